// Small plots of what /live tells: a line over the last minute, or bars by position.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 110, LEFT = 34, RIGHT = 6, TOP = 8, BOTTOM = 18;
export const SECONDS = 60;

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const short = (value) =>
  value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
const tick = (value) => (Number.isInteger(value) ? String(value) : short(value));

function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

export class Plot {
  constructor(parent, title, unit) {
    this.title = title;
    this.unit = unit;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = title;
    this.now = document.createElement("b");
    caption.append(name, this.now);
    this.svg = node("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    figure.append(caption, this.svg);
    parent.append(figure);
    this.lines([], "no figure yet");
  }

  frame(top, left, right) {
    const bottom = HEIGHT - BOTTOM;
    return [
      node("path", { class: "axis", d: `M${LEFT} ${TOP}V${bottom}H${WIDTH - RIGHT}` }),
      node("text", { x: LEFT - 4, y: TOP + 5, "text-anchor": "end" }, tick(top)),
      node("text", { x: LEFT - 4, y: bottom + 2, "text-anchor": "end" }, "0"),
      node("text", { x: LEFT, y: HEIGHT - 4 }, left),
      node("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, right),
    ];
  }

  tell(words, parts) {
    this.now.textContent = words;
    this.svg.setAttribute("aria-label", `${this.title}: ${words}`);
    this.svg.replaceChildren(...parts);
  }

  // series: [[age in seconds, value or null], ...] each
  lines(series, words) {
    const values = series.flat().map(([, value]) => value).filter((value) => value !== null);
    const top = ceiling(Math.max(1, ...values));
    const parts = this.frame(top, `${SECONDS} s ago`, `${this.unit}, now`);
    series.forEach((points, index) => {
      let path = "", pen = "M";
      for (const [age, value] of points) {
        if (value === null) { pen = "M"; continue; }
        const x = WIDTH - RIGHT - (age / SECONDS) * (WIDTH - RIGHT - LEFT);
        const y = HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
        // "h0": a point without neighbours is a dot.
        path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h0" : ""}`;
        pen = "L";
      }
      parts.push(node("path", { class: index ? "line second" : "line", d: path }));
    });
    this.tell(words, parts);
  }

  bars(values, words) {
    const parts = this.frame(1, "position 1", String(Math.max(1, values.length)));
    const step = (WIDTH - RIGHT - LEFT) / Math.max(1, values.length);
    values.forEach((value, index) => {
      const height = value * (HEIGHT - BOTTOM - TOP);
      parts.push(node("rect", {
        x: LEFT + index * step + step * 0.15, y: HEIGHT - BOTTOM - height,
        width: step * 0.7, height, rx: 1.5,
      }));
    });
    this.tell(words, parts);
  }
}
