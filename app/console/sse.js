// Server-sent events, as the HTML standard has them (section 9.2.6): the data of each event, wherever the bytes are cut.

export class EventParser {
  constructor() {
    this._decoder = new TextDecoder();
    // Mutable: a line that is not whole yet, the data of an event that is not, and whether a CR was the last character.
    this._line = "";
    this._data = [];
    this._endedWithCr = false;
  }

  /** The data of the events that are whole with these bytes. */
  push(bytes) {
    let text = this._decoder.decode(bytes, { stream: true });
    if (this._endedWithCr && text.startsWith("\n")) text = text.slice(1);
    if (text !== "") this._endedWithCr = text.endsWith("\r");
    const lines = (this._line + text).split(/\r\n|\r|\n/);
    this._line = lines.pop();
    return lines.map((line) => this._take(line)).filter((data) => data !== null);
  }

  _take(line) {
    if (line === "") {
      const data = this._data.length ? this._data.join("\n") : null;
      this._data = [];
      return data;
    }
    const colon = line.indexOf(":");
    const [name, value] = colon < 0 ? [line, ""] : [line.slice(0, colon), line.slice(colon + 1)];
    if (name === "data") this._data.push(value.startsWith(" ") ? value.slice(1) : value);
    return null; // a comment, or a field that says nothing here
  }
}

/** The data of each event of a response, as they come. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
