// Small charts in SVG: lines and stacked areas over time, and bars. Each can be read with a pointer, with the arrow
// keys, and as a table. Knows nothing of what it draws.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 144, LOW = 44, HIGH = 216, LEFT = 4, RIGHT = 4, TOP = 8, BOTTOM = 18;

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, text = "") {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return node;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const places = size >= 100 ? 0 : size >= 10 ? 1 : digits - 1;
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumFractionDigits: places });
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  const text = value > 99.9 && value < 100 ? "99.9" : value.toFixed(1);
  return text.replace(/\.0$/, "") + "%";
}

function ago(seconds) {
  if (seconds < 0.5) return "now";
  return seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

function niceTop(value, floor) {
  const least = Math.max(value, floor);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= least * 0.999);
}

// series: {key, label, tone: a..d, dashed?, shade?: "half" | "faint", value?(index, columns)}
// options: {title, unit?, stacked?, band?, top?: fixed, floor?, format?, step?, smooth?, marks?: key, note?}
// smooth: longer spans show the mean of some seconds, and say of how many.
export class TimeChart {
  constructor(parent, options, series) {
    this.options = { format: number, floor: 1, ...options };
    this.series = series;
    this.at = null;
    const id = `chart-${options.title.toLowerCase().replace(/\W+/g, "-")}`;
    this.legend = el("div", { class: "legend" });
    this.plot = svg("svg", { class: `plot ${options.band ? "low" : options.stacked ? "high" : ""}`, role: "img", tabindex: "0" });
    this.said = el("div", { class: "hidden", "aria-live": "polite" });
    this.table = el("table");
    this.details = el("details", {}, el("summary", {}, "Table", el("span", { class: "hidden" }, ` of ${options.title}`)), this.table);
    this.panel = el("section", { class: `panel ${options.wide ? "wide" : ""}`, "aria-labelledby": id },
      el("h2", { id }, options.title), this.legend, this.plot, this.said, this.details);
    this.values = series.map((one) => {
      const value = el("b");
      if (!one.unlisted) this.legend.append(el("span", {}, swatch(one, options), `${one.label} `, value));
      return value;
    });
    this.when = el("span");
    this.note = el("span", {}, options.note ?? "");
    this.legend.append(this.when, this.note);
    parent.append(this.panel);
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.release());
    this.plot.addEventListener("blur", () => this.release());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.details.addEventListener("toggle", () => this.tabulate());
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  update(columns, now, span) {
    const times = columns.unix_s;
    let first = times.findIndex((time) => time >= now - span);
    if (first < 0) first = times.length;
    this.now = now;
    this.span = span;
    this.times = times.slice(first);
    const seconds = this.options.smooth ? Math.round(span / 60) : 1;
    if (this.options.smooth) this.note.textContent = seconds > 1 ? `mean of ${seconds} s` : "";
    this.rows = this.series.map((one) => smoothed(columns[one.key], seconds).slice(first));
    this.marks = this.options.marks ? columns[this.options.marks].slice(first) : [];
    this.draw();
    this.tabulate();
  }

  x(time) {
    return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.now - time) / this.span);
  }

  point(offset) {
    if (!this.times?.length) return;
    const time = this.now - this.span * (1 - (offset - LEFT) / (this.width - LEFT - RIGHT));
    this.at = this.times.reduce((best, each) => (Math.abs(each - time) < Math.abs(best - time) ? each : best));
    this.draw();
  }

  release() {
    this.at = null;
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") this.release();
    if (step === undefined || !this.times?.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    const here = this.at === null ? last : this.times.indexOf(this.at);
    this.at = this.times[Math.min(Math.max((here < 0 ? last : here) + step, 0), last)];
    this.draw();
    const index = this.times.indexOf(this.at);
    this.said.textContent = `${ago(this.now - this.at)}: ${this.sentence(index)}`;
  }

  sentence(index) {
    return this.series.map((one, i) => `${one.label} ${this.show(this.rows[i][index])}`).join(", ");
  }

  show(value) {
    if (typeof value === "boolean") return value ? "yes" : "no";
    const text = this.options.format(value);
    return this.options.unit && text !== "–" ? `${text} ${this.options.unit}` : text;
  }

  draw() {
    if (!this.times) return;
    this.width = this.plot.clientWidth || 320;
    this.height = this.options.band ? LOW : this.options.stacked ? HIGH : HEIGHT;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const last = this.times.length - 1;
    const index = this.at === null ? last : this.times.indexOf(this.at);
    this.values.forEach((node, i) => (node.textContent = last < 0 ? "–" : this.show(this.rows[i][index < 0 ? last : index])));
    this.when.textContent = this.at === null || index < 0 ? "" : ago(this.now - this.at);
    this.plot.setAttribute("aria-label", last < 0 ? `${this.options.title}: no data yet`
      : `${this.options.title}, last ${this.span / 60} min. Now: ${this.sentence(last)}. Arrow keys read earlier values.`);
    const top = this.options.top ?? (this.options.stacked ? this.highest() || 1 : niceTop(this.highest(), this.options.floor));
    const y = (value) => this.height - BOTTOM - (this.height - TOP - BOTTOM) * Math.min(value / top, 1);
    const parts = this.options.band ? [] : this.gridLines(top, y);
    parts.push(...this.timeLabels());
    if (last >= 0) {
      if (this.options.band) parts.push(...this.bands());
      else if (this.options.stacked) parts.push(...this.areas(y));
      else parts.push(...this.series.map((one, i) => this.line(one, this.rows[i], y)));
      this.marks.forEach((count, i) => {
        const at = this.x(this.times[i]);
        if (count) parts.push(svg("line", { class: "mark", x1: at, x2: at, y1: 1, y2: this.height - BOTTOM + 3 }));
      });
    }
    if (!this.options.band) parts.push(...this.gridTexts(top, y));
    if (this.at !== null && index >= 0) {
      parts.push(svg("line", { class: "cross", x1: this.x(this.at), x2: this.x(this.at), y1: 0, y2: this.height - BOTTOM }));
    }
    this.plot.replaceChildren(...parts);
  }

  highest() {
    if (!this.options.stacked) return Math.max(0, ...this.rows.flat());
    return Math.max(0, ...this.times.map((_, i) => this.rows.reduce((sum, row) => sum + row[i], 0)));
  }

  gridLines(top, y) {
    return [0, top / 2, top].map((value) => svg("line", { class: "grid", x1: 0, x2: this.width, y1: y(value), y2: y(value) }));
  }

  gridTexts(top, y) {
    return [top / 2, top].map((value) => svg("text", { x: LEFT, y: y(value) + 12 }, this.options.format(value)));
  }

  timeLabels() {
    const y = this.height - 4, minutes = this.span / 60;
    const half = minutes / 2 < 1 ? `−${this.span / 2} s` : `−${minutes / 2} min`;
    return [
      svg("text", { x: LEFT, y }, `−${minutes} min`),
      svg("text", { x: this.width / 2, y, "text-anchor": "middle" }, half),
      svg("text", { x: this.width - RIGHT, y, "text-anchor": "end" }, "now"),
    ];
  }

  // A pen lifts where nothing is known, and where looks are missing.
  line(one, row, y) {
    let path = "", down = false, before = null;
    row.forEach((value, i) => {
      const time = this.times[i];
      if (before !== null && time - before > 5) down = false;
      before = time;
      if (value === null) { down = false; return; }
      const at = this.x(time).toFixed(1), height = y(value).toFixed(1);
      if (down && this.options.step) path += `H${at}V${height}`;
      else path += `${down ? "L" : "M"}${at} ${height}`;
      if (!down) path += "h.01";
      down = true;
    });
    return svg("path", { class: `ln s${one.tone} ${one.dashed ? "dash" : ""}`, d: path || "M0 0" });
  }

  areas(y) {
    const floor = this.times.map(() => 0);
    return this.series.map((one, s) => {
      const below = floor.map((value, i) => `${this.x(this.times[i]).toFixed(1)} ${y(value).toFixed(1)}`);
      this.rows[s].forEach((value, i) => (floor[i] += value));
      const above = floor.map((value, i) => `${this.x(this.times[i]).toFixed(1)} ${y(value).toFixed(1)}`);
      return svg("path", { class: `f${one.tone} ${one.shade ?? ""}`, d: `M${above.join("L")}L${below.reverse().join("L")}Z` });
    });
  }

  bands() {
    const [one] = this.series, parts = [];
    let begin = 0;
    this.times.forEach((time, i) => {
      const next = i + 1;
      if (next < this.times.length && this.rows[0][next] === this.rows[0][i]) return;
      const left = this.x(this.times[begin]), right = this.x(this.times[Math.min(next, this.times.length - 1)]);
      const shade = this.rows[0][i] ? "" : "faint";
      parts.push(svg("rect", { class: `f${one.tone} ${shade}`, x: left, width: Math.max(right - left, 1), y: 4, height: this.height - BOTTOM - 6 }));
      begin = next;
    });
    return parts;
  }

  tabulate() {
    if (!this.details.open || !this.times) return;
    const count = Math.min(10, this.times.length);
    const chosen = Array.from({ length: count }, (_, i) => Math.round(((i + 1) * this.times.length) / count) - 1);
    const head = el("tr", {}, el("th", { scope: "col" }, "When"), ...this.series.map((one) => el("th", { scope: "col" }, one.label)));
    const body = chosen.reverse().map((index) => el("tr", {}, el("th", { scope: "row" }, ago(this.now - this.times[index])),
      ...this.rows.map((row) => el("td", {}, this.show(row[index])))));
    this.table.replaceChildren(el("caption", { class: "hidden" }, this.options.title), el("thead", {}, head), el("tbody", {}, ...body));
  }
}

// Each value as the mean of the known ones among it and those just before; unknown where it is unknown.
function smoothed(values, count) {
  if (count < 2) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    const known = values.slice(Math.max(0, i - count + 1), i + 1).filter((one) => one !== null);
    return known.reduce((sum, one) => sum + one, 0) / known.length;
  });
}

function swatch(one, options) {
  const picture = svg("svg", { width: 18, height: 10, "aria-hidden": "true" });
  picture.append(options.stacked || options.band
    ? svg("rect", { class: `f${one.tone} ${one.shade ?? ""}`, width: 14, height: 10, x: 2, rx: 2 })
    : svg("path", { class: `ln s${one.tone} ${one.dashed ? "dash" : ""}`, d: "M1 5H17" }));
  return picture;
}

// Choices by TPOT / target: a bar up to each edge, and one above the last; a line where the target is.
export class Histogram {
  constructor(parent, name) {
    this.name = name;
    this.picture = svg("svg", { class: "plot tall", role: "img" });
    this.table = el("table");
    this.none = el("p", { class: "waiting" }, "No choice with a TPOT target has ended in this time.");
    this.details = el("details", {}, el("summary", {}, "Table", el("span", { class: "hidden" }, ` of ${name}`)), this.table);
    parent.append(this.none, this.picture, this.details);
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  update(counts, edges) {
    this.counts = counts;
    this.edges = edges;
    this.draw();
  }

  draw() {
    if (!this.counts) return;
    const { counts, edges, picture } = this, total = counts.reduce((sum, count) => sum + count, 0);
    this.none.hidden = total > 0;
    picture.toggleAttribute("hidden", !total);
    this.details.hidden = !total;
    const width = picture.clientWidth || 320, height = 176, foot = 34, step = width / counts.length;
    const target = edges.indexOf(1) + 1, most = Math.max(...counts, 1);
    const met = counts.slice(0, target).reduce((sum, count) => sum + count, 0);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("aria-label", `${met} of ${total} choices were at or below their TPOT target`);
    const parts = counts.flatMap((count, i) => {
      if (!count) return [];
      const tall = Math.max((height - foot - 22) * (count / most), 2), y = height - foot - tall;
      return [
        svg("rect", { class: i < target ? "fgood" : "fbad", x: i * step + 1.5, width: step - 3, y, height: tall, rx: 2 }),
        svg("text", { x: (i + 0.5) * step, y: y - 4, "text-anchor": "middle" }, String(count)),
      ];
    });
    const every = step < 26 ? 2 : 1;
    edges.forEach((edge, i) => {
      if ((i - target + 1) % every) return;
      const look = { class: edge === 1 ? "strong" : "", x: (i + 1) * step, y: height - foot + 13, "text-anchor": "middle" };
      parts.push(svg("text", look, String(edge)));
    });
    const at = target * step;
    picture.replaceChildren(...parts,
      svg("line", { class: "grid", x1: 0, x2: width, y1: height - foot, y2: height - foot }),
      svg("line", { class: "mark", x1: at, x2: at, y1: 10, y2: height - foot }),
      svg("text", { x: at - 6, y: height - 4, "text-anchor": "end" }, "← met"), svg("text", { x: at + 6, y: height - 4 }, "missed →"));
    this.table.replaceChildren(el("caption", { class: "hidden" }, this.name), el("tbody", {}, ...counts.map((count, i) =>
      el("tr", {}, el("th", { scope: "row" }, i < edges.length ? `up to ${edges[i]}` : `above ${edges.at(-1)}`),
        el("td", { class: "num" }, String(count))))));
  }
}

export function bar(share, bad = false) {
  const inner = el("i");
  inner.style.width = `${(100 * share).toFixed(1)}%`;
  return el("span", { class: bad ? "bar bad" : "bar", "aria-hidden": "true" }, inner);
}
