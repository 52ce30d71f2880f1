// Requests to the server that this page comes from. Addresses are relative, so that a proxy may serve it in a folder.

import { eventsOf } from "./sse.js";

const KEY = "jaxinfer.key";

/** An answer that is an error. retryAfter: seconds, or null. */
export class ApiError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

/** No answer, or one that broke off. */
export class NetworkError extends Error {}

export const hooks = {
  /** Asks the user for a key; wrong: whether one was sent. Resolves to whether there is a new one. */
  needKey: async (wrong) => false, // eslint-disable-line no-unused-vars
  /** Told when no answer came. */
  offline: () => {},
};

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function send(path, options) {
  const headers = new Headers(options.headers);
  const sent = key.get();
  if (sent) headers.set("Authorization", `Bearer ${sent}`);
  try {
    return [await fetch(path, { ...options, headers, cache: "no-store" }), sent];
  } catch (error) {
    if (error.name === "AbortError") throw error;
    hooks.offline();
    throw new NetworkError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 500) || response.statusText || `The server answered with status ${response.status}.`;
  try {
    message = JSON.parse(text).error?.message ?? message;
  } catch { /* no JSON: a proxy's page, say */ }
  const wait = Number.parseFloat(response.headers.get("Retry-After"));
  return new ApiError(message, response.status, Number.isFinite(wait) ? wait : null);
}

/** The response to a request. Asks for a key where the server wants one. Throws ApiError, NetworkError. */
export async function request(path, options = {}) {
  for (;;) {
    const [response, sent] = await send(path, options);
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    // Another request may have got the key meanwhile.
    if (sent === key.get() && !(await hooks.needKey(sent !== ""))) throw await errorOf(response);
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();

const post = (body, signal) =>
  body instanceof FormData
    ? { method: "POST", body, signal }
    : { method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json" } };

export const postJson = (path, body, signal) => getJson(path, post(body, signal));

/** The chunks of a streamed answer. Throws as `request` does, also for an error among the chunks. */
export async function* stream(path, body, signal) {
  const response = await request(path, post({ ...body, stream: true, stream_options: { include_usage: true } }, signal));
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    hooks.offline();
    throw new NetworkError("The connection broke off.");
  }
  throw new NetworkError("The answer ended early.");
}
