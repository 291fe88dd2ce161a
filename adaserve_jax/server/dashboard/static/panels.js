// What is shown where: tiles, charts and tables, from one snapshot and the series kept so far.

import { Histogram, TimeChart, bar, el, number, percent } from "./charts.js";

const $ = (id) => document.getElementById(id);
const milliseconds = (value) => (value === null || value === undefined ? "–" : number(value));
const CAUSES = {
  rejected: "no room, or refused", failed: "an error", unfinished: "cut off", queueing: "waited for a slot",
  prefill: "slow prefill", infeasible: "out of reach", preemption: "preempted", low_acceptance: "low acceptance", budget: "steps too long",
};
const ENDINGS = { stop: "stop", length: "length", abort: "cut off", cancelled: "the client left", error: "error", rejected: "rejected" };

export class Panels {
  constructor() {
    const parent = $("panels"), before = $("last-panel");
    const make = (options, series) => {
      const chart = new TimeChart(parent, options, series);
      parent.insertBefore(parent.lastChild, before);
      return chart;
    };
    this.charts = [
      make({ title: "Tokens per second", floor: 10, smooth: true }, [
        { key: "generation_tps", label: "generated", tone: "a" },
        { key: "goodput_tps", label: "goodput, 1 min", tone: "b", dashed: true },
      ]),
      make({ title: "Requests", floor: 4, step: true }, [
        { key: "running", label: "running", tone: "a" },
        { key: "waiting", label: "waiting", tone: "b", dashed: true },
      ]),
      make({ title: "Time to first token", unit: "ms", floor: 10, format: milliseconds }, [
        { key: "ttft_p50_ms", label: "p50", tone: "a" },
        { key: "ttft_p99_ms", label: "p99", tone: "b", dashed: true },
      ]),
      make({ title: "Attainment over time", top: 1, format: percent }, [
        { key: "attainment", label: "all classes, 1 min", tone: "a" },
      ]),
      make({ title: "Draft trees", floor: 4, smooth: true }, [
        { key: "depth", label: "depth", tone: "a" },
        { key: "width", label: "width", tone: "b", dashed: true },
      ]),
      make({ title: "Verify budget", unit: "tokens", floor: 8, smooth: true }, [
        { key: "budget", label: "budget", tone: "c" },
      ]),
      make({ title: "Draft tokens accepted", top: 1, smooth: true, format: percent }, [
        { key: "acceptance_rate", label: "accepted", tone: "c" },
      ]),
      make({ title: "Prefix cache hits", top: 1, smooth: true, format: percent }, [
        { key: "cache_hit_rate", label: "prompt tokens found", tone: "d" },
      ]),
      make({ title: "Draft on the device", band: true, marks: "swaps", note: "strokes: swaps with KV pages" }, [
        { key: "draft_resident", label: "resident", tone: "c" },
      ]),
      make({ title: "KV pages", stacked: true, wide: true, floor: 8, format: (value) => number(value) }, [
        { key: "base_used", label: "base used", tone: "a" },
        { key: "base_cached", label: "base cached", tone: "a", shade: "half" },
        { key: "base_free", label: "base free", tone: "a", shade: "faint" },
        { key: "extension_used", label: "extension used", tone: "b" },
        { key: "extension_cached", label: "extension cached", tone: "b", shade: "half" },
        { key: "extension_free", label: "extension free", tone: "b", shade: "faint" },
      ]),
    ];
    this.below = el("div", { class: "below" });
    this.charts.find((chart) => chart.options.band).panel.append(this.below);
    this.over = new Histogram($("over"), "TPOT over target");
    this.shown = new Map();
    this.span = 300;
    for (const input of document.querySelectorAll("#spans input")) {
      input.addEventListener("change", () => {
        this.span = Number(input.value);
        if (this.snapshot) this.update(this.snapshot, this.columns);
      });
      if (input.checked) this.span = Number(input.value);
    }
  }

  update(snapshot, columns) {
    this.snapshot = snapshot;
    this.columns = columns;
    const window = snapshot.windows.find((one) => one.ended.window_s === this.span);
    this.head(snapshot);
    this.emptiness(snapshot, columns);
    this.tiles(snapshot, window, columns);
    this.fill("classes", [snapshot.windows, snapshot.classes], () => this.classes(snapshot));
    this.fill("causes", window.ended.causes, () => this.causes(window.ended.causes));
    this.fill("last", snapshot.last_requests, () => this.last(snapshot.last_requests));
    this.fill("below", [snapshot.swaps, snapshot.swap_s, snapshot.arms, snapshot.learning], () => this.swaps(snapshot));
    this.over.update(window.ended.over_target, snapshot.over_target_edges);
    for (const chart of this.charts) chart.update(columns, snapshot.now_unix_s, this.span);
    $("footer").textContent = this.footer(snapshot, window);
  }

  // Draws only what changed, so that a selection in a table survives.
  fill(name, value, draw) {
    const text = JSON.stringify(value);
    if (this.shown.get(name) === text) return;
    this.shown.set(name, text);
    draw();
  }

  head(snapshot) {
    $("model").textContent = snapshot.model ?? "";
    document.title = snapshot.model ? `${snapshot.model} – adaserve` : "adaserve";
    const draft = snapshot.draft ? `draft ${snapshot.draft}` : "no draft model";
    $("engine").textContent = snapshot.model
      ? `${snapshot.policy} · ${snapshot.device} · ${draft} · one token alone ${number(snapshot.baseline_ms)} ms` : "";
  }

  emptiness(snapshot, columns) {
    const idle = !snapshot.ended_requests && !snapshot.in_flight && !columns.running.some((count) => count > 0);
    $("empty").hidden = !idle || snapshot.status !== "ok";
    this.fill("example", [snapshot.model, snapshot.classes], () => {
      const named = snapshot.classes.filter((one) => one.tpot_target_ms !== null);
      const body = { prompt: "def add(a, b):", max_tokens: 64, ...(named.length ? { slo_class: named[0].name } : { slo_tpot_ms: 40 }) };
      $("example").textContent = `curl ${location.origin}/v1/completions -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body)}'`;
      $("class-names").textContent = snapshot.classes.map((one) => `${one.name} (${targets(one)})`).join(", ");
    });
  }

  tiles(snapshot, window, columns) {
    const all = window.ended.attainment[0], at = columns.unix_s.length - 1;
    const now = (key) => (at < 0 ? null : columns[key][at]);
    const pages = ["base_used", "base_cached", "base_free", "extension_used", "extension_cached", "extension_free"].map(now);
    const used = pages[0] + pages[3], total = pages.reduce((sum, count) => sum + count, 0);
    const { ttft_ms: ttft, tpot_ms: tpot } = window.ended;
    const swaps = Object.values(snapshot.swaps).reduce((sum, count) => sum + count, 0);
    const tiles = [
      ["Attainment", percent(all.attainment), "", (all.with_target ? `${all.met} of ${all.with_target} met their targets` : "no targets in this time")
        + (all.cancelled ? `, ${all.cancelled} cancelled` : "")],
      ["Goodput", number(window.ended.goodput_tps), "tok/s", `of ${number(window.engine.throughput_tps)} tok/s generated`],
      ["Running", number(now("running")), "", `${number(now("waiting"))} waiting, ${snapshot.in_flight} in flight`],
      ["Time to first token", milliseconds(ttft?.p50), "ms p50", ttft ? `p90 ${milliseconds(ttft.p90)}, p99 ${milliseconds(ttft.p99)} ms` : "none in this time"],
      ["Time per token", milliseconds(tpot?.p50), "ms p50", tpot ? `p90 ${milliseconds(tpot.p90)}, p99 ${milliseconds(tpot.p99)} ms` : "none in this time"],
      ["Draft accepted", percent(window.engine.acceptance_rate), "", window.ended.mean_accepted === null ? "nothing verified" : `${number(window.ended.mean_accepted)} tokens per verification`],
      ["KV pages used", total ? percent(used / total) : "–", "", `${number(used)} of ${number(total)}; ${number(pages[1] + pages[4])} cached`],
      ["Prefix cache hits", percent(window.engine.cache_hit_rate), "", `${number(window.engine.prompt_tps)} prompt tok/s taken in`],
      ["Draft", !snapshot.draft ? "none" : snapshot.draft === "remote" ? "remote" : at < 0 ? "–" : now("draft_resident") ? "resident" : "away", "", swaps ? `${number(swaps)} swaps so far` : "no swaps so far"],
    ];
    const list = $("tiles");
    if (!list.children.length) {
      list.append(...tiles.map(([name]) => el("div", {}, el("dt", {}, name), el("dd"), el("dd", { class: "sub" }))));
    }
    tiles.forEach(([, value, unit, sub], i) => {
      const [, main, small] = list.children[i].children;
      main.replaceChildren(value, ...(unit && value !== "–" ? [el("small", {}, ` ${unit}`)] : []),
        ...(i === 0 && all.with_target ? [bar(all.attainment, all.attainment < 0.9)] : []));
      small.textContent = sub;
    });
  }

  classes(snapshot) {
    const target = Object.fromEntries(snapshot.classes.map((one) => [one.name, targets(one)]));
    const names = snapshot.windows.at(-1).ended.attainment.map((one) => one.slo_class);
    const cell = (window, name) => {
      const one = window.ended.attainment.find((each) => each.slo_class === name);
      if (!one?.with_target) return el("td", { class: "share" }, el("small", {}, one?.requests ? unjudged(one) : "–"));
      return el("td", { class: "share" }, el("b", {}, percent(one.attainment)), " ", el("small", {}, `${one.met} of ${one.with_target}`), bar(one.attainment, one.attainment < 0.9));
    };
    $("classes").tBodies[0].replaceChildren(...names.map((name) => el("tr", {}, el("th", { scope: "row" }, name),
      el("td", {}, target[name] ?? ""), ...snapshot.windows.map((window) => cell(window, name)))));
  }

  // Beside the draft: exchanges with KV pages, the shape thought best by size of batch, where the policy learns one, and
  // what drafts that learn have come to.
  swaps(snapshot) {
    const table = (title, heads, rows) => el("table", {}, el("caption", { class: "hidden" }, title),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows.map(([name, ...values]) => el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, value))))));
    const swaps = Object.entries(snapshot.swaps).map(([kind, count]) => [kind, number(count), `${number(snapshot.swap_s[kind] ?? 0)} s`]);
    const arms = Object.entries(snapshot.arms).sort(([one], [other]) => one - other).map(([bucket, arm]) => [bucket, arm]);
    const learning = snapshot.learning.map((one) => [one.name, number(one.version), percent(one.acceptance_rate),
      percent(one.held_out_acceptance), number(one.refused + one.rolled_back)]);
    this.below.replaceChildren(
      ...(swaps.length ? [table("Swaps", ["Swap", "Count", "Took"], swaps)] : []),
      ...(arms.length ? [table("Shape of draft trees thought best, by rows of a step", ["Rows up to", "Best shape"], arms)] : []),
      ...(snapshot.learning.length ? [table("Drafts that learn", ["Draft", "Version", "Accepted", "Held out", "Refused"], learning)] : []));
  }

  causes(causes) {
    const rows = Object.entries(causes).sort(([, one], [, other]) => other - one);
    if (!rows.length) return $("causes").replaceChildren(el("p", { class: "waiting" }, "No target was missed in this time."));
    const most = rows[0][1];
    $("causes").replaceChildren(el("table", {}, el("caption", { class: "hidden" }, "Targets missed, by cause"), el("tbody", {}, ...rows.map(([cause, count]) =>
      el("tr", {}, el("th", { scope: "row" }, CAUSES[cause] ?? cause), el("td", { class: "bars" }, bar(count / most, true)), el("td", { class: "num" }, number(count)))))));
  }

  last(requests) {
    const cell = (text, kind = "") => el("td", kind ? { class: kind } : {}, text);
    const against = (value, target, kind = "num") => el("td", { class: kind }, value === null ? "–" : number(value),
      ...(target === null ? [] : [el("small", { class: "muted" }, ` / ${number(target)}`)]));
    $("last").tBodies[0].replaceChildren(...requests.map((one) => {
      const outcome = one.met === null ? "none" : one.met ? "met" : "missed";
      const words = one.ending === "cancelled" ? "cancelled" : one.met === null ? "no target" : one.met ? "met" : CAUSES[one.cause] ?? "missed";
      return el("tr", {}, cell(new Date(1000 * one.ended_unix_s).toLocaleTimeString("en-GB")), cell(one.slo_class),
        cell(words, `outcome ${outcome}`), against(one.tpot_ms, one.tpot_target_ms), against(one.ttft_ms, one.ttft_target_ms),
        against(one.e2e_ms, one.e2e_target_ms, "num opt"),
        cell(milliseconds(one.queue_ms), "num opt"), cell(`${one.prompt_tokens}, ${one.output_tokens}`, "num opt"),
        cell(number(one.mean_accepted), "num opt"), cell(one.error_code ?? ENDINGS[one.ending], "opt"),
        el("td", { class: "opt", title: one.request_id }, one.request_id + (one.index ? ` #${one.index}` : "")));
    }));
  }

  footer(snapshot, window) {
    const parts = [`watched since ${new Date(1000 * snapshot.started_unix_s).toLocaleString("sv-SE")}`];
    if (window.ended.covered_s < this.span - 1) parts.push(`figures cover ${Math.round(window.ended.covered_s)} s so far`);
    parts.push(`${number(snapshot.ended_requests)} choices ended`, `${number(snapshot.preemptions)} preemptions`);
    if (snapshot.compiles_after_ready) parts.push(`${snapshot.compiles_after_ready} compilations after ready: a bug, please report it`);
    return parts.join(" · ");
  }
}

function unjudged(one) {
  const without = one.requests - one.cancelled;
  return [...(without ? [`${without} without target`] : []), ...(one.cancelled ? [`${one.cancelled} cancelled`] : [])].join(", ");
}

function targets(one) {
  const parts = [];
  if (one.tpot_target_ms !== null) parts.push(`${number(one.tpot_target_ms)} ms per token`);
  if (one.ttft_target_ms !== null) parts.push(`first in ${number(one.ttft_target_ms)} ms`);
  if (one.e2e_target_ms !== null) parts.push(`all in ${number(one.e2e_target_ms)} ms`);
  return parts.join(", ") || "none";
}
