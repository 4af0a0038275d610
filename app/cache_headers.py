"""`Cache-Control` of requests (RFC 9111, section 5.2.1) and `Cache-Status` of answers (RFC 9211)."""

from typing import NamedTuple


class CacheControl(NamedTuple):
    """What a request says. `max_age_s` None: nothing of it."""

    no_store: bool = False
    no_cache: bool = False
    only_if_cached: bool = False
    max_age_s: float | None = None

    @property
    def asks(self) -> bool:
        """Whether the caller asks for a stored answer."""
        return self.only_if_cached or self.max_age_s is not None


SILENT = CacheControl()


def read_cache_control(header: bytes | None) -> CacheControl:
    """Directives that mean nothing here are passed over. An age that is no number makes every stored answer too old, as
    section 4.2.1 encourages."""
    if not header:
        return SILENT
    said: dict[str, str] = {}
    for directive in header.decode("latin-1").lower().split(","):
        name, _, value = directive.partition("=")
        said[name.strip()] = value.strip().strip('"')
    max_age = said.get("max-age")
    max_age_s = None if max_age is None else float(max_age) if max_age.isascii() and max_age.isdigit() else 0.0
    return CacheControl("no-store" in said, "no-cache" in said, "only-if-cached" in said, max_age_s)


MISS = b"headrace; fwd=miss"
COLLAPSED = b"headrace; fwd=miss; collapsed"
REQUEST = b"headrace; fwd=request"
NOT_IN_CACHE = b'headrace; detail="not in cache"'


def hit(ttl_s: float, tier: str) -> bytes:
    return b"headrace; hit; ttl=%d; detail=%b" % (ttl_s, tier.encode())


def bypass(reason: str) -> bytes:
    return b'headrace; fwd=bypass; detail="%b"' % reason.encode()
