// Where tokens come from: the names, colours (style.css) and meanings that `specdec generate` has.

export const ORIGINS = {
  draft: "proposed by the draft model, accepted",
  lookup: "copied from earlier text, accepted",
  cache: "a phrase kept from earlier rounds, accepted",
  grammar: "the only token that the grammar allows, accepted",
  target: "drawn by the target to begin a tree",
  correction: "the target's, in place of a rejected token",
  bonus: "the target's own, after a draft accepted whole",
};

export const BRANCH = "not the first choice there: from another branch of the token tree";

const KINDS = [...Object.entries(ORIGINS), ["branch", BRANCH]];

/** The items of a legend, by what they explain. */
export function legend() {
  return KINDS.map(([kind, meaning]) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = kind === "branch" ? "token draft branch" : `token ${kind}`;
    sample.textContent = kind;
    item.dataset.kind = kind;
    item.append(sample, ` ${meaning}`);
    return item;
  });
}

/** What the legend explains of a token. */
export const kinds = (token) => [token.origin, ...(token.branch ? ["branch"] : [])];
