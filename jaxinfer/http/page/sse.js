// Server-sent events of a response, by the rules of the HTML standard.

/** Divides text that comes in pieces into events; a piece may end anywhere, also between \r and \n. */
export class EventParser {
  #rest = "";
  #data = [];

  /** Takes the next piece; returns the data of the events that it completes. */
  push(piece) {
    const events = [];
    const text = this.#rest + piece;
    let start = 0;
    for (const end of text.matchAll(/\r\n|\n|\r(?!$)/g)) {
      this.#take(text.slice(start, end.index), events);
      start = end.index + end[0].length;
    }
    this.#rest = text.slice(start);
    return events;
  }

  #take(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      this.#data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

/** The data of the events of a stream of bytes, whose pieces may end within a character. */
export async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
