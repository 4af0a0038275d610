"""Server-sent events in every form that the standard allows, in whatever pieces they come."""

import random
import time

import pytest

from app.engines.event_parser import MAX_EVENT_BYTES, EventParser, ParsedEvent
from routing.errors import EngineError

# Bytes, and the events that they are.
FORMS = {
    "lf": (b"data: a\n\ndata: b\n\n", [(b"a", None), (b"b", None)]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"a", None), (b"b", None)]),
    "cr": (b"data: a\r\rdata: b\r\r", [(b"a", None), (b"b", None)]),
    "mixed line ends": (
        b"data: a\r\n\ndata: b\n\r\ndata: c\r\n\rdata: d\n\r",
        [(b"a", None), (b"b", None), (b"c", None), (b"d", None)],
    ),
    "no space after the colon": (b'data:{"a":1}\n\n', [(b'{"a":1}', None)]),
    "one space of two is part of the form": (b"data:  a\n\n", [(b" a", None)]),
    "other white space is data": (b"data:\ta \n\n", [(b"\ta ", None)]),
    "comments": (b": ping\n\n:\n\ndata: a\n: in between\n\n", [(b"a", None)]),
    "comment of colons": (b"::: data: x\n\ndata: a\n\n", [(b"a", None)]),
    "several lines of data": (b"data: {\ndata:  1\ndata: }\n\n", [(b"{\n 1\n}", None)]),
    "several lines with crlf": (b"data: {\r\ndata: }\r\n\r\n", [(b"{\n}", None)]),
    "name": (b"event: error\ndata: a\n\ndata: b\n\n", [(b"a", "error"), (b"b", None)]),
    "name after the data": (b"data: a\nevent: x\n\n", [(b"a", "x")]),
    "last name counts": (b"event: x\nevent:y\ndata: a\n\n", [(b"a", "y")]),
    "empty name is none": (b"event:\ndata: a\n\n", [(b"a", None)]),
    "name without data is no event": (b"event: x\n\ndata: a\n\n", [(b"a", None)]),
    "ids and retries": (b"retry: 1000\nid: 1\ndata: a\n\nid: 2\n\nid\ndata: b\n\n", [(b"a", None), (b"b", None)]),
    "unknown fields": (b"colour: red\ndatas: x\n data: y\nDATA: z\ndata: a\n\n", [(b"a", None)]),
    "colons in the data": (b"data: a: b:c\n\n", [(b"a: b:c", None)]),
    "empty data": (b"data\n\ndata:\n\ndata: \n\n", [(b"", None)] * 3),
    "empty lines of data": (b"data\ndata\n\n", [(b"\n", None)]),
    "many blank lines": (b"\n\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", [(b"a", None), (b"b", None)]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\ndata: b\n\n", [(b"a", None), (b"b", None)]),
    "byte order mark later on is data's": (b"data: \xef\xbb\xbfa\n\n", [(b"\xef\xbb\xbfa", None)]),
    "second byte order mark spoils a field": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [(b"b", None)]),
    "begins as a byte order mark does": (b"\xef\xbbdata: a\n\ndata: b\n\n", [(b"b", None)]),
    "text beyond ASCII": ("data: Grüße, 世界 🌍\n\n".encode(), [("Grüße, 世界 🌍".encode(), None)]),
    "bytes that are no text": (b"data: \xff\xfe\x00\n\n", [(b"\xff\xfe\x00", None)]),
    "done in the data": (
        b'data: {"a": "data: [DONE]"}\n\ndata: [DONE]\n\n',
        [(b'{"a": "data: [DONE]"}', None), (b"[DONE]", None)],
    ),
    "no blank line at the end is no event": (b"data: a\n\ndata: b\n", [(b"a", None)]),
    "no line end at the end is no event": (b"data: a\n\ndata: b", [(b"a", None)]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_the_same_events_however_they_are_split(form: str) -> None:
    data, events = FORMS[form]
    expected = [whole(*event) for event in events]
    assert EventParser().feed(data) == expected
    assert parsed(data[place : place + 1] for place in range(len(data))) == expected
    for place in range(len(data) + 1):
        assert parsed([data[:place], data[place:]]) == expected
        assert parsed([data[:place], b"", data[place:]]) == expected


def test_forms_one_after_the_other_are_split_at_random() -> None:
    chance = random.Random(7)
    ended = [
        (data, events) for data, events in FORMS.values() if data.endswith((b"\n\n", b"\r\r", b"\n\r", b"\r\n\r\n"))
    ]
    for _ in range(300):
        several = chance.sample([form for form in ended if b"\xef\xbb" not in form[0]], 5)
        data = b"".join(form for form, _ in several)
        places = sorted(chance.choices(range(len(data)), k=8))
        pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
        assert parsed(pieces) == [whole(*event) for _, events in several for event in events]


def test_event_is_there_as_soon_as_its_blank_line_is() -> None:
    parser = EventParser()
    for newline in (b"\n", b"\r\n", b"\r"):
        assert parser.feed(b"data: a" + newline) == []
        assert parser.feed(newline[:1]) == [whole(b"a")]
        assert parser.feed(newline[1:]) == []


def test_event_that_never_ends_is_an_error() -> None:
    for piece in (b"x" * 65536, b"data: y\n" * 8192):
        parser = EventParser()
        for _ in range(MAX_EVENT_BYTES // len(piece)):
            assert parser.feed(piece) == []
        with pytest.raises(EngineError, match="too large"):
            parser.feed(piece)


def test_long_event_in_many_pieces_takes_no_more_time_than_it_has_to() -> None:
    parser = EventParser()
    began = time.process_time()
    for _ in range(60_000):
        assert parser.feed(b"x" * 256) == []
    (event,) = parser.feed(b"\n\ndata: a\n\n")
    assert event == whole(b"a")
    assert time.process_time() - began < 1.0


def whole(data: bytes, name: str | None = None) -> ParsedEvent:
    return data, name


def parsed(pieces) -> list[ParsedEvent]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]
