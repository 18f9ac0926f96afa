// A pane: one answer, its tokens, its rounds and its speed.

import { describe } from "./card.js";

const HEIGHT = 8; // pixels of a token in the strip
const LEAST = 0.1; // milliseconds of a round, so that every round is seen

export class Pane {
  constructor(title) {
    this.element = document.querySelector("#pane").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h2").textContent = title;
    this.text = this.element.querySelector(".text");
    this.strip = this.element.querySelector(".strip");
    this.speed = this.element.querySelector(".speed b");
    this.counts = this.element.querySelector(".counts");
    for (const part of [this.text, this.strip]) {
      for (const kind of ["pointerover", "focusin"]) {
        part.addEventListener(kind, (event) => this.point(event.target.closest("[data-round]")));
      }
      for (const kind of ["pointerleave", "focusout"]) {
        part.addEventListener(kind, () => this.point(null));
      }
    }
  }

  /** A new answer after `before`: a prompt, or in a conversation the user's next message. */
  begin(before, chat) {
    if (!chat) this.text.replaceChildren();
    const said = document.createElement(chat ? "p" : "span");
    said.className = chat ? "user" : "prompt";
    said.textContent = before;
    this.answer = document.createElement("span");
    this.answer.className = "answer";
    this.text.append(said, this.answer);
    this.rewind();
  }

  /** The answer begins again. */
  rewind() {
    for (const old of this.text.querySelectorAll("[data-round]")) delete old.dataset.round;
    this.answer.replaceChildren();
    this.strip.replaceChildren();
    this.rounds = [];
    this.tokens = [];
    this.drafted = this.accepted = this.seconds = 0;
    this.first = null;
    this.show();
  }

  /** A round, `seconds` after the request was sent. */
  add(round, seconds) {
    const number = this.rounds.push(round) - 1;
    if (round.tokens.length) this.first ??= seconds;
    this.seconds = seconds;
    this.drafted += round.drafted;
    this.accepted += round.accepted;
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    for (const token of round.tokens) {
      const span = document.createElement("span");
      span.className = `token ${token.origin}${token.branch ? " branch" : ""}`;
      span.dataset.round = number;
      span.dataset.token = this.tokens.push(token) - 1;
      span.textContent = token.text;
      this.answer.append(span);
    }
    if (scrollHeight - scrollTop - clientHeight < 40) this.text.scrollTop = this.text.scrollHeight;
    this.strip.append(column(round, number));
    this.strip.scrollLeft = this.strip.scrollWidth;
    this.show();
  }

  /** What the answer says. */
  get said() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Tokens a second since the request was sent. */
  get rate() {
    return this.seconds ? this.tokens.length / this.seconds : 0;
  }

  show() {
    const { drafted, accepted, first } = this;
    const [tokens, rounds] = [this.tokens.length, this.rounds.length];
    this.speed.textContent = tokens ? this.rate.toFixed(1) : "–";
    const facts = [`${tokens} tokens`, `${rounds} rounds`];
    if (rounds) facts.push(`${(tokens / rounds).toFixed(2)} tokens a round`);
    if (drafted) facts.push(`${Math.round((100 * accepted) / drafted)} % accepted`);
    if (first !== null) facts.push(`first token ${Math.round(1000 * first)} ms`);
    this.counts.textContent = facts.join(" · ");
  }

  /** Mark the round of `element`, and say what is known of it; of none where null. */
  point(element) {
    for (const old of this.element.querySelectorAll(".marked")) old.classList.remove("marked");
    const number = element?.dataset.round;
    const round = this.rounds[number];
    if (!round) return describe(null);
    for (const part of this.element.querySelectorAll(`[data-round="${number}"]`)) {
      part.classList.add("marked");
    }
    describe(element, sentence(round, number), round, this.tokens[element.dataset.token]);
  }
}

/** A round in the strip, as wide as it took: its tokens, and above them what was thrown away. */
function column(round, number) {
  const column = document.createElement("button");
  column.type = "button";
  column.dataset.round = number;
  column.setAttribute("aria-label", sentence(round, number));
  column.style.flexGrow = Math.max(round.milliseconds, LEAST);
  for (const { origin } of round.tokens) column.append(cell(origin, 1));
  const lost = round.drafted - round.accepted;
  if (lost) column.append(cell("lost", lost));
  return column;
}

function cell(kind, count) {
  const cell = document.createElement("i");
  cell.className = kind;
  cell.dataset.count = count;
  cell.style.flexBasis = `${HEIGHT * count}px`;
  return cell;
}

function sentence(round, number) {
  const { drafted, accepted, milliseconds } = round;
  return (
    `Round ${Number(number) + 1}: ${drafted} drafted, ${accepted} accepted, ` +
    `${drafted - accepted} thrown away, ${milliseconds.toFixed(1)} ms`
  );
}
