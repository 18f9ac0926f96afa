// Where tokens come from: the names, colours (style.css) and meanings that `specdec generate` has.

export const ORIGINS = {
  draft: "proposed by the draft model, accepted",
  lookup: "copied from earlier text, accepted",
  cache: "a phrase kept from earlier rounds, accepted",
  retrieval: "found in the datastore, accepted",
  target: "drawn by the target to begin a tree",
  correction: "the target's, in place of a rejected token",
  bonus: "the target's own, after a draft accepted whole",
};

export const BRANCH = "not the first choice there: from another branch of the token tree";

/** The legend's items; those of `seen` origins stand out. */
export function legend(list) {
  for (const [origin, meaning] of Object.entries(ORIGINS)) {
    const item = document.createElement("li");
    item.dataset.origin = origin;
    item.title = meaning;
    const sample = document.createElement("span");
    sample.className = `token ${origin}`;
    sample.textContent = origin;
    item.append(sample, ` ${meaning}`);
    list.append(item);
  }
  const item = document.createElement("li");
  item.dataset.origin = "branch";
  item.title = BRANCH;
  const sample = document.createElement("span");
  sample.className = "token draft branch";
  sample.textContent = "branch";
  item.append(sample, ` ${BRANCH}`);
  list.append(item);
}
