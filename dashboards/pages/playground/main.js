// The page: what is asked, and the race of two answers to it.

import { kinds, legend } from "./origins.js";
import { Pane } from "./pane.js";
import { Refused, events } from "./stream.js";

const $ = (selector) => document.querySelector(selector);
const form = $("#ask");
const panes = { on: new Pane("With speculation"), off: new Pane("Without speculation") };
const HOW = {
  alone:
    "The second answer is decoded after the first one, so that neither slows the other; " +
    "the first is shown again beside it as it came.",
  together:
    "Both answers share the server's steps: the plain one waits for the other's drafts. " +
    "“One after the other” times each alone.",
  none: "",
};
const EXAMPLES = {
  completion: 'def read_lines(path):\n    """Return the lines of a file."""\n',
  chat: "Explain in two sentences what speculative decoding is.",
};
let turns = []; // of the conversation
let running = null; // what stops the answers
let chats = true; // whether the model has a chat template

const kind = () => form.elements.mode.value;
const race = () => form.elements.race.value;

function number(name) {
  const { value } = form.elements[name];
  return value === "" ? null : Number(value);
}

/** The request's path and body. */
function request(prompt, enabled) {
  const chat = kind() === "chat";
  const body = {
    ...(chat ? { messages: turns } : { prompt }),
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_rounds: true },
    speculative: { enabled },
  };
  return [chat ? "v1/chat/completions" : "v1/completions", body];
}

/** Stream an answer into a pane; returns its rounds with the seconds at which they came. */
async function ask(pane, prompt, enabled) {
  const came = [];
  const { signal } = running;
  const [path, body] = request(prompt, enabled);
  const start = performance.now();
  const key = form.elements.key.value;
  for await (const { round } of events(path, body, { key, signal })) {
    if (!round) continue;
    const seconds = (performance.now() - start) / 1000;
    came.push([round, seconds]);
    pane.add(round, seconds);
    explain(round.tokens.flatMap(kinds));
  }
  return came;
}

/** Explain these kinds of tokens as well; before there are any, all of them. */
function explain(shown) {
  for (const kind of shown) $(`#legend [data-kind=${kind}]`).classList.add("seen");
}

/** Show an answer again as it came; where that is stopped, the rest of it at once. */
async function replay(pane, came) {
  const { signal } = running;
  pane.rewind();
  const start = performance.now();
  for (const [round, seconds] of came) {
    const wait = start + 1000 * seconds - performance.now();
    if (wait > 0 && !signal.aborted) await sleep(wait, signal);
    pane.add(round, seconds);
  }
}

/** Wait, but no longer than until `signal` is aborted. */
function sleep(milliseconds, signal) {
  return new Promise((done) => {
    setTimeout(done, milliseconds);
    signal.addEventListener("abort", done, { once: true });
  });
}

async function answer(prompt) {
  const chat = kind() === "chat";
  const { on, off } = panes;
  if (chat) turns.push({ role: "user", content: prompt });
  arrange();
  for (const pane of [on, off]) pane.begin(prompt, chat);
  let whole = null; // the first answer, of which its replay shows a part
  try {
    if (race() === "together") {
      await Promise.all([ask(on, prompt, true), ask(off, prompt, false)]);
    } else {
      const came = await ask(on, prompt, true);
      whole = on.said;
      if (race() === "alone") await Promise.all([replay(on, came), ask(off, prompt, false)]);
    }
  } finally {
    // What was said stays in the conversation, also where it was stopped.
    const said = whole ?? on.said;
    if (chat && said) turns.push({ role: "assistant", content: said });
    else if (chat) turns.pop();
  }
  return race() === "none" ? "" : verdict();
}

function verdict() {
  const { on, off } = panes;
  const times = `${(on.rate / off.rate).toFixed(2)} × the tokens a second`;
  if (on.said === off.said) return `${times}, the same text`;
  return number("temperature") > 0 ? `${times}, each text drawn anew` : `${times}, another text`;
}

/** Show the panes that the race has. */
function arrange() {
  $("#panes").replaceChildren(panes.on.element, ...(race() === "none" ? [] : [panes.off.element]));
  $("#how").textContent = HOW[race()];
}

/** While answers are `awaited` they can only be stopped. */
function enable(awaited) {
  for (const field of form.elements) field.disabled = (field.id === "stop") !== awaited;
  if (!chats) form.elements.mode[1].disabled = true;
}

function say(message, failed = false) {
  $("#message").textContent = message;
  $("#message").classList.toggle("failed", failed);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  const prompt = $("#prompt").value;
  enable(true);
  say("…");
  try {
    const result = await answer(prompt);
    say(running.signal.aborted ? "stopped" : result);
    if (kind() === "chat") $("#prompt").value = "";
  } catch (error) {
    if (error instanceof Refused && error.status === 401) $("#key").hidden = false;
    say(running.signal.aborted ? "stopped" : error.message, !running.signal.aborted);
    running.abort(); // the other one, too
  } finally {
    running = null;
    enable(false);
    $("#prompt").focus();
  }
});

$("#stop").addEventListener("click", () => running?.abort());
$("#clear").addEventListener("click", () => begin());

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

form.elements.race.addEventListener("change", arrange);
for (const radio of form.elements.mode) radio.addEventListener("change", () => begin());

/** Begin anew, with the example of this kind of prompt. */
function begin() {
  turns = [];
  for (const pane of Object.values(panes)) {
    pane.text.replaceChildren();
    pane.begin("", false);
  }
  $("#prompt").value = EXAMPLES[kind()];
  $("#clear").hidden = kind() !== "chat";
  say("");
}

/** What is served, from /health. */
async function served() {
  const health = await (await fetch("health")).json();
  const badges = [health.lossless ? "lossless" : "lossy"];
  if (health.certified !== undefined) badges.push(health.certified ? "certified" : "not certified");
  $("#served").replaceChildren(`${health.model} · ${health.label} · `, code(health.configuration));
  for (const text of badges) {
    const badge = document.createElement("span");
    badge.className = `badge ${text.replace(" ", "-")}`;
    badge.textContent = text;
    $("#served").append(" ", badge);
  }
  document.title = `${health.model} – specdec`;
  chats = health.chat !== false;
  enable(running !== null);
}

function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

$("#legend").append(...legend());
begin();
arrange();
served().catch((error) => say(`/health: ${error.message}`, true));
