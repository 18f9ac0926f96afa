// The card that says what is known of the round, and the token, under the pointer.

import { BRANCH, ORIGINS } from "./origins.js";

const card = document.querySelector("#card");

/** Show the card beside `element`; hide it where null. */
export function describe(element, sentence, round, token) {
  card.hidden = element === null;
  if (element === null) return;
  card.replaceChildren(paragraph("b", sentence));
  if (round.arm) card.append(paragraph("p", `drafted by ${round.arm}`));
  if (token) card.append(told(token));
  if (round.candidates.length) card.append(tree(round.candidates));
  const parts = `draft ${ms(round.draft_milliseconds)}, target ${ms(round.target_milliseconds)}`;
  card.append(paragraph("small", parts));
  place(element.getBoundingClientRect());
}

/** A token: its origin, and how probable the target and the drafter found it. */
function told(token) {
  const line = document.createElement("p");
  const sample = document.createElement("span");
  sample.className = `token ${token.origin}`;
  sample.textContent = visible(token.text);
  line.append(sample, ` ${ORIGINS[token.origin]}`);
  if (token.branch) line.append(`; ${BRANCH}`);
  const facts = [];
  if (token.probability !== null) facts.push(`target ${share(token.probability)}`);
  if (token.drafted !== null) facts.push(`drafter ${share(token.drafted)}`);
  if (facts.length) line.append(document.createElement("br"), facts.join(", "));
  return line;
}

/** The candidates: a chain as text; of a tree a line for each place, with what competes for it. */
function tree(candidates) {
  const list = document.createElement("ul");
  const depths = [];
  const chain = candidates.every(({ parent }, node) => parent === node - 1);
  for (const { accepted, origin, parent, probability, text } of candidates) {
    const depth = parent < 0 ? 0 : depths[parent] + 1;
    depths.push(depth);
    const place = chain ? 0 : depth;
    const line = list.children[place] ?? list.appendChild(document.createElement("li"));
    const sample = document.createElement("span");
    sample.className = accepted ? `token ${origin}` : "token lost";
    sample.textContent = visible(text);
    line.append(sample, probability === null ? "\u200b" : ` ${share(probability)}  `);
  }
  return list;
}

/** Below the element or above it, within the window. */
function place({ left, top, bottom }) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const below = bottom + 8 + height <= innerHeight;
  card.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  card.style.top = `${below ? bottom + 8 : Math.max(8, top - 8 - height)}px`;
}

function paragraph(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const share = (p) => `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;
const ms = (t) => `${t.toFixed(1)} ms`;
