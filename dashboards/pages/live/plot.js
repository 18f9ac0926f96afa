// The rates of all configurations: a dot for each.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, BOTTOM] = [720, 380, 58, 40];

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** Draw `trials`; `fastest` gets a ring. */
export function plot(svg, trials, fastest) {
  const right = 1.05 * Math.max(0.5, ...trials.map((t) => t.discard_rate));
  const x = (rate) => LEFT + (rate / right) * (WIDTH - LEFT - 10);
  const y = (rate) => 10 + (1 - Math.min(rate, 1)) * (HEIGHT - BOTTOM - 10);
  const parts = [];
  for (let k = 0; k <= 4; k++) {
    const [across, up] = [(right * k) / 4, k / 4];
    parts.push(
      element("line", { x1: LEFT, x2: WIDTH - 10, y1: y(up), y2: y(up) }),
      element("text", { x: LEFT - 8, y: y(up) + 4, "text-anchor": "end" }, up.toFixed(2)),
      element("text", { x: x(across), y: HEIGHT - 20, "text-anchor": "middle" }, across.toFixed(1)),
    );
  }
  const middle = { x: (LEFT + WIDTH) / 2, y: HEIGHT - 2, "text-anchor": "middle" };
  parts.push(element("text", middle, "discard rate"));
  const across = { x: 0, y: 0, "text-anchor": "middle", transform: "translate(11 170) rotate(-90)" };
  parts.push(element("text", across, "verification rate"));
  for (const trial of trials) {
    const place = { cx: x(trial.discard_rate), cy: y(trial.verification_rate) };
    const dot = element("circle", { ...place, r: 4.5, fill: trial.colour, "fill-opacity": 0.75 });
    dot.append(element("title", {}, `${trial.label}: estimated ${trial.estimated_speedup.toFixed(2)} ×`));
    parts.push(dot);
    if (trial === fastest) parts.push(element("circle", { ...place, r: 9, class: "fastest" }));
  }
  svg.replaceChildren(...parts);
}
