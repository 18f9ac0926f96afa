// Follows a sweep: asks for what is new once a second.

import { element, plot } from "./plot.js";

const $ = (selector) => document.querySelector(selector);
const SHOWN = 10; // of the fastest
const trials = [];

function made(tag, text, name = "") {
  const part = document.createElement(tag);
  part.textContent = text;
  part.className = name;
  return part;
}

function time(seconds) {
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

function stage(state) {
  $("#name").textContent = state.name ? `${state.name} · ${state.prompts} prompts` : "…";
  const steps = state.steps ? ` · ${state.done} of ${state.steps}` : "";
  $("#stage").textContent = state.stage + steps;
  const left = state.left === null ? "" : `, about ${time(state.left)} left of this stage`;
  $("#time").textContent = `${time(state.seconds)} so far${left}`;
  if (state.steps) {
    $("#progress").max = state.steps;
    $("#progress").value = state.done;
  } else $("#progress").removeAttribute("value");
  $("#warnings").replaceChildren(...state.warnings.map((text) => made("li", text)));
}

function counted() {
  const ranked = trials.toSorted((a, b) => b.estimated_speedup - a.estimated_speedup);
  $("#count").textContent = trials.length;
  plot($("#plot"), trials, ranked[0]);
  const families = new Map(trials.map((trial) => [trial.family, trial.colour]));
  $("#families").replaceChildren(
    ...[...families].map(([family, colour]) => {
      const item = made("li", "");
      const dot = element("svg", { viewBox: "0 0 10 10" });
      dot.append(element("circle", { cx: 5, cy: 5, r: 5, fill: colour }));
      item.append(dot, family);
      return item;
    }),
  );
  $("#best").replaceChildren(
    ...ranked.slice(0, SHOWN).map((trial) => {
      const row = document.createElement("tr");
      row.append(
        made("td", trial.label),
        made("td", `${trial.estimated_speedup.toFixed(2)} ×`),
        made("td", trial.mat.toFixed(2)),
        made("td", trial.discard_rate.toFixed(2)),
      );
      return row;
    }),
  );
}

function timed({ timings, champion }) {
  $("#result").hidden = timings.length === 0;
  const labels = new Map(trials.map((trial) => [trial.id, trial.label]));
  const most = Math.max(1, ...timings.map((timing) => timing.high));
  const percent = (value) => `${(100 * value) / most}%`;
  const fastest = timings.toSorted((a, b) => b.speedup - a.speedup);
  const rows = fastest.flatMap(({ high, id, low, speedup }) => {
    const name = id === champion ? "champion" : "";
    const [bar, interval, value] = [made("div", "", "bar"), made("i", ""), made("b", "")];
    interval.style.left = percent(low);
    interval.style.width = percent(high - low);
    value.style.left = percent(speedup);
    bar.append(interval, value);
    return [
      made("span", labels.get(id) ?? id, name),
      bar,
      made("span", `${speedup.toFixed(2)} × (${low.toFixed(2)}–${high.toFixed(2)})`, name),
    ];
  });
  $("#timings").replaceChildren(...rows);
}

async function follow() {
  for (;;) {
    let state;
    try {
      state = await (await fetch(`state?known=${trials.length}`)).json();
    } catch {
      $("#time").textContent = "the sweep's command has ended";
      $("#progress").value = $("#progress").max;
      return;
    }
    trials.push(...state.trials);
    stage(state);
    if (state.trials.length) counted();
    timed(state);
    await new Promise((done) => setTimeout(done, 1000));
  }
}

follow();
