"use strict";
// The charts of time, memory and alternatives.
const charts = {};

// Stacked bars: one for each plan, all on the scale of the slowest.
charts.bars = (holder) => {
  const rows = DATA.plans.map((plan) => ({
    name: plan.name,
    total: plan.prediction ? plan.prediction.row.seconds : plan.plan.seconds,
    parts: plan.prediction
      ? plan.prediction.parts
      : Object.entries(plan.plan.split).map(([name, value]) => ({ name, seconds: value })),
  }));
  const longest = Math.max(...rows.map((row) => row.total)) || 1;
  const used = [...new Set(rows.flatMap((row) => row.parts.filter((part) => part.seconds > 0).map((part) => part.name)))];
  const list = el("div", { class: "bars" });
  for (const row of rows) {
    const bar = el("div", { class: "bar", role: "img" });
    const texts = [];
    for (const part of row.parts) {
      if (!(part.seconds > 0)) continue;
      const share = part.seconds / row.total;
      texts.push(`${part.name} ${seconds(part.seconds)}`);
      const label = part.seconds > 0.07 * longest ? `${part.name} ${percent(share)}` : "";
      bar.append(tipped(el("span", {
        class: part.name === "bubble" ? "hatched" : null, text: label,
        style: `width:${100 * part.seconds / longest}%;background-color:${colour(partColour(part.name))};color:${colour(inkOn(partColour(part.name)))}`,
      }), part.name, [seconds(part.seconds), `${percent(share)} of the step`]));
    }
    bar.setAttribute("aria-label", `${row.name}: ${texts.join(", ")}`);
    list.append(el("div", { class: "bar-row" }, el("span", { text: row.name }), bar, el("span", { text: seconds(row.total) })));
  }
  holder.append(list, legend(used.map((name) => [name, partColour(name), name === "bubble"])));
  if (DATA.plans.some((plan) => !plan.prediction)) {
    holder.append(el("p", { class: "note", text: "A bar of compute, communication and resharding is the planner's own estimate, in which none of them overlap." }));
  }
};

// Exposed and hidden communication of each axis.
charts.axes = (holder) => {
  const rows = DATA.plans.flatMap((plan) => (plan.prediction?.axes || []).map((axis) => ({ plan: plan.name, ...axis })));
  if (!rows.length) return;
  const longest = Math.max(...rows.map((row) => Math.max(row.communication, row.exposed))) || 1;
  const several = DATA.plans.length > 1;
  const list = el("div", { class: "bars" });
  for (const row of rows) {
    const hidden = Math.max(0, row.communication - row.exposed);
    const shade = axisColour(row.axis);
    const part = (length, name, faint) => tipped(el("span", {
      style: `width:${100 * length / longest}%;background-color:${colour(shade)};opacity:${faint ? 0.35 : 1}`,
    }), `${row.axis}: ${name}`, [seconds(length)]);
    list.append(el("div", { class: "bar-row" },
      el("span", { text: several ? `${row.axis} (${row.plan})` : row.axis }),
      el("div", { class: "bar", role: "img", "aria-label": `${row.axis}: exposed ${seconds(row.exposed)} of ${seconds(row.communication)}` },
        part(row.exposed, "exposed", false), part(hidden, "beside computation", true)),
      el("span", { text: seconds(row.exposed) })));
  }
  holder.append(
    el("h3", { text: "Communication by mesh axis" }),
    el("p", { class: "note", text: "The full colour is exposed: the devices wait for it. The faint part runs beside computation." }),
    list);
};

// A chart with axes: `place(x, y)` in pixels, and the SVG to add to.
function frame(width, height, options) {
  const margin = { left: 62, right: 14, top: 12, bottom: 38 };
  const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
  const scale = (log, low, high, length) =>
    log ? (v) => (length * Math.log(v / low)) / Math.log(high / low) : (v) => (length * (v - low)) / (high - low || 1);
  const across = scale(options.log, options.x[0], options.x[1], inner.width);
  const up = scale(options.log, options.y[0], options.y[1], inner.height);
  const x = (v) => margin.left + across(v);
  const y = (v) => margin.top + inner.height - up(v);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
  const xs = options.log ? powers(...options.x) : ticks(...options.x, width / 110);
  const ys = options.log ? powers(...options.y) : ticks(...options.y, 5);
  for (const v of thinned(xs, Math.max(2, width / 75))) {
    root.append(svg("line", { class: "axis", x1: x(v), x2: x(v), y1: margin.top, y2: margin.top + inner.height }),
      svg("text", { x: x(v), y: height - margin.bottom + 15, "text-anchor": "middle", text: options.xText(v) }));
  }
  for (const v of thinned(ys, 9)) {
    root.append(svg("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: y(v), y2: y(v) }),
      svg("text", { x: margin.left - 6, y: y(v) + 4, "text-anchor": "end", text: options.yText(v) }));
  }
  root.append(svg("text", { x: width - margin.right, y: height - 6, "text-anchor": "end", text: options.xName }));
  if (options.yName) root.append(svg("text", { x: 2, y: 10, text: options.yName }));
  return { root, x, y, margin, inner };
}

const KERNEL_COLOURS = { gemm: "blue", conv: "indigo", attention: "green", "attention backward": "teal", memory: "orange", "host copy": "wine" };

const LEAST_SHARE = 1e-4; // of the kernels' time, for a point of a roofline

charts.rooflines = (holder) => {
  for (const plan of DATA.plans) {
    const kernels = plan.prediction?.kernels;
    if (!kernels) continue;
    const timed = kernels.kernels.filter((k) => k.seconds > 0);
    const all = timed.reduce((sum, k) => sum + k.seconds * k.launches, 0);
    const withFlops = timed.filter((k) => k.flops > 0 && k.bytes > 0);
    const points = withFlops.filter((k) => k.seconds * k.launches >= LEAST_SHARE * all);
    const shown = points.reduce((sum, k) => sum + k.seconds * k.launches, 0);
    const figure = el("figure", {}, el("figcaption", { text: `Roofline of kernels${DATA.plans.length > 1 ? `, ${plan.name}` : ""}` }));
    holder.append(figure);
    if (!points.length) {
      figure.append(el("p", { class: "muted", text: "No kernel has FLOP and bytes." }));
      continue;
    }
    const roofs = kernels.devices.flatMap((device) => {
      const dtypes = [...new Set(points.filter((k) => k.kind !== "memory").map((k) => k.dtype))].filter((d) => device.flop_per_s[d]);
      const peaks = dtypes.map((dtype) => [`${dtype}, ${rate(device.flop_per_s[dtype], "FLOP/s")}`, device.flop_per_s[dtype]]);
      return { bandwidth: device.bytes_per_s, name: device.name, peaks: peaks.length ? peaks : [["", Math.max(...Object.values(device.flop_per_s))]] };
    });
    const intensities = [...points.map((k) => k.flops / k.bytes), ...roofs.flatMap((r) => r.peaks.map(([, peak]) => peak / r.bandwidth))];
    const rates = [...points.map((k) => k.flops / k.seconds), ...roofs.flatMap((r) => r.peaks.map(([, peak]) => peak))];
    const around = (values, low, high) => [Math.min(...values) / low, Math.max(...values) * high];
    const xRange = around(intensities, 4, 4);
    const yRange = around(rates, 2, 8);
    responsive(figure, (width) => {
      const chart = frame(width, 300, {
        log: true, x: xRange, y: yRange, xName: "FLOP per byte", yName: "FLOP/s", label: `Roofline: ${points.length} kinds of kernels`,
        xText: (v) => (v < 0.01 || v > 9999 ? v.toExponential(0) : String(Number(v.toPrecision(2)))), yText: (v) => rate(v, ""),
      });
      const { root, x, y, inner, margin } = chart;
      const id = `clip${Math.random().toString(36).slice(2)}`;
      root.append(svg("clipPath", { id }, svg("rect", { x: margin.left, y: margin.top, width: inner.width, height: inner.height })));
      const plot = svg("g", { "clip-path": `url(#${id})` });
      for (const roof of roofs) {
        for (const [name, peak] of roof.peaks) {
          const ridge = peak / roof.bandwidth;
          plot.append(svg("polyline", {
            points: [[xRange[0], xRange[0] * roof.bandwidth], [ridge, peak], [xRange[1], peak]].map(([a, b]) => `${x(a)},${y(b)}`).join(" "),
            fill: "none", style: "stroke:var(--text);stroke-width:1.5",
          }));
          root.append(svg("text", { class: "strong", x: x(xRange[1]) - 4, y: y(peak) - 15, "text-anchor": "end", text: `${roof.name} ${name}` }));
        }
      }
      const largest = Math.max(...points.map((k) => k.seconds * k.launches));
      for (const k of points) {
        const total = k.seconds * k.launches;
        plot.append(tipped(svg("circle", {
          cx: x(k.flops / k.bytes), cy: y(k.flops / k.seconds), r: 3 + 9 * Math.sqrt(total / largest),
          style: `fill:${colour(KERNEL_COLOURS[k.kind] || "grey")};fill-opacity:.6;stroke:var(--card)`,
        }), k.name, [
          `${k.kind}${k.dtype ? `, ${k.dtype}` : ""}${k.phase ? `, ${k.phase}` : ""}`,
          `${count(k.launches)} × ${seconds(k.seconds)}, ${percent(total / all)} of the kernels' time`,
          `${rate(k.flops / k.seconds, "FLOP/s")}, ${Number((k.flops / k.bytes).toPrecision(3))} FLOP per byte`,
        ]));
      }
      root.append(plot);
      return root;
    });
    const kinds = [...new Set(points.map((k) => k.kind))];
    const moving = timed.filter((k) => !k.flops && k.bytes > 0);
    const moved = moving.reduce((sum, k) => sum + k.bytes * k.launches, 0);
    const movingTime = moving.reduce((sum, k) => sum + k.seconds * k.launches, 0);
    const left = kernels.total - kernels.kernels.length;
    figure.append(
      legend(kinds.map((kind) => [kind, KERNEL_COLOURS[kind] || "grey"])),
      el("p", { class: "note", text:
        `A circle is a kind of equal kernels, its area their share of the time. ${percent(all ? shown / all : 0)} of the kernels' time is shown; the rest has no FLOP${withFlops.length > points.length ? `, or takes less than ${100 * LEAST_SHARE} % per kind (${count(withFlops.length - points.length)} left out)` : ""}.`
        + (movingTime ? ` Those without FLOP move ${rate(moved / movingTime, "B/s")}, of ${roofs.map((r) => rate(r.bandwidth, "B/s")).join(" or ")}.` : "")
        + (left > 0 ? ` ${count(left)} kinds of kernels of the least time are left out.` : "")
        + (plan.fidelity === "analytic" ? " Bytes are those of single equations, so fused ones may lie above the roof." : "") }));
  }
};

// Memory over time as stacked steps, with the budget.
charts.memories = (holder) => {
  for (const plan of DATA.plans) {
    const meshes = plan.prediction?.memory || [];
    if (!meshes.length) continue;
    const total = (level) => level.slice(1).reduce((sum, size) => sum + size, 0);
    const peak = (mesh) => Math.max(0, ...mesh.levels.map(total));
    let chosen = meshes.reduce((best, mesh, i) => (peak(mesh) > peak(meshes[best]) ? i : best), 0);
    const figure = el("figure", {}, el("figcaption", { text: `Memory of a device over time${DATA.plans.length > 1 ? `, ${plan.name}` : ""}` }));
    holder.append(figure);
    const budgetShown = el("input", { type: "checkbox", "aria-label": "Scale to the budget" });
    budgetShown.checked = peak(meshes[chosen]) > 0.25 * meshes[chosen].budget;
    const select = el("select", { "aria-label": "Mesh" },
      ...meshes.map((mesh, i) => el("option", { value: i, text: `mesh ${mesh.mesh}: ${bytes(peak(mesh))} at most` })));
    select.value = chosen;
    figure.append(el("div", { class: "tools" }, select, el("label", { class: "note" }, budgetShown, " scale to the budget")));
    const end = plan.prediction.row.seconds;
    const redraw = responsive(figure, (width) => {
      const mesh = meshes[chosen];
      const top = budgetShown.checked ? Math.max(peak(mesh), mesh.budget) * 1.12 : peak(mesh) * 1.2 || 1;
      const { root, x, y, inner, margin } = frame(width, 260, {
        x: [0, end || 1], y: [0, top], xName: "time", xText: seconds, yText: bytes,
        label: `Memory of mesh ${mesh.mesh}: ${bytes(peak(mesh))} at most, budget ${bytes(mesh.budget)}`,
      });
      const below = mesh.levels.map(() => 0);
      mesh.roles.forEach((role, r) => {
        const outline = [];
        const base = [];
        mesh.levels.forEach((level, i) => {
          const next = i + 1 < mesh.levels.length ? mesh.levels[i + 1][0] : end;
          const upper = below[i] + level[r + 1];
          outline.push(`${x(level[0])},${y(upper)}`, `${x(next)},${y(upper)}`);
          base.push(`${x(level[0])},${y(below[i])}`, `${x(next)},${y(below[i])}`);
          below[i] = upper;
        });
        const largest = Math.max(...mesh.levels.map((level) => level[r + 1]));
        if (!largest) return;
        const area = svg("polygon", { points: [...outline, ...base.reverse()].join(" "), style: `fill:${colour(ROLE_COLOURS[role] || "grey")}` });
        area.addEventListener("pointermove", (event) => {
          const box = root.getBoundingClientRect();
          const time = ((event.clientX - box.left - margin.left) / inner.width) * end;
          const at = mesh.levels.findLast((level) => level[0] <= time) || mesh.levels[0];
          showTip(event, role, [`${bytes(at[r + 1])} at ${seconds(Math.max(0, time))}`, `${bytes(total(at))} in all`, `${bytes(largest)} of ${role} at most`]);
        });
        area.addEventListener("pointerleave", hideTip);
        root.append(area);
      });
      const inside = mesh.budget <= top;
      const line = inside ? y(mesh.budget) : margin.top + 1;
      root.append(
        svg("line", { x1: margin.left, x2: width - margin.right, y1: line, y2: line, style: `stroke:var(--red);stroke-width:1.5;stroke-dasharray:${inside ? "6 4" : "1 5"}` }),
        svg("text", { class: "strong", x: width - margin.right - 4, y: line + 14, "text-anchor": "end", text: `budget ${bytes(mesh.budget)}${inside ? "" : ", above this scale"}` }));
      return root;
    });
    figure.append(legend(meshes[chosen].roles.map((role) => [role, ROLE_COLOURS[role] || "grey"])));
    select.addEventListener("change", () => { chosen = Number(select.value); redraw(); });
    budgetShown.addEventListener("change", redraw);
  }
  if (!holder.childElementCount) holder.remove();
};

// Time and memory of all plans; those that no other beats in both are joined.
charts.pareto = (holder) => {
  const points = DATA.alternatives.filter((a) => a.seconds > 0 && a.num_bytes > 0);
  if (points.length < 2) return;
  const best = [...points].sort((a, b) => a.seconds - b.seconds || a.num_bytes - b.num_bytes)
    .reduce((front, a) => (!front.length || a.num_bytes < front.at(-1).num_bytes ? [...front, a] : front), []);
  const range = (values) => [Math.min(...values) / 1.3, Math.max(...values) * 1.3];
  const figure = el("figure", {}, el("figcaption", { text: "Time and memory: lower left is better" }));
  holder.append(figure);
  responsive(figure, (width) => {
    const { root, x, y, margin } = frame(width, 300, {
      log: true, x: range(points.map((p) => p.seconds)), y: range(points.map((p) => p.num_bytes)),
      xName: "time of a step", xText: seconds, yText: bytes, label: `Time and memory of ${points.length} plans`,
    });
    root.append(svg("polyline", {
      points: best.map((p) => `${x(p.seconds)},${y(p.num_bytes)}`).join(" "), fill: "none",
      style: "stroke:var(--muted);stroke-dasharray:4 4",
    }));
    const labels = [];
    for (const p of points) {
      const cx = x(p.seconds);
      const cy = y(p.num_bytes);
      root.append(tipped(svg("circle", {
        cx, cy, r: p.shown ? 7 : 5, tabindex: "0",
        style: p.shown ? "fill:var(--blue);stroke:var(--card)" : "fill:var(--card);stroke:var(--red);stroke-width:2",
      }), p.name, [seconds(p.seconds), bytes(p.num_bytes)]));
      const name = p.name.length > 30 ? `${p.name.slice(0, 29)}…` : p.name;
      const half = name.length * 6.2;
      const left = cx + 10 + half > width - margin.right;
      const start = left ? cx - 10 - half : cx + 10;
      if (start < margin.left || labels.some(([a, b, c]) => Math.abs(b - cy) < 13 && start < c && start + half > a)) continue;
      const covered = (q) => q !== p && Math.abs(y(q.num_bytes) - cy) < 9 && x(q.seconds) > start - 6 && x(q.seconds) < start + half + 6;
      if (points.some(covered)) continue; // the tooltip and the table have the name
      labels.push([start, cy, start + half]);
      root.append(svg("text", { class: "strong", x: left ? cx - 10 : cx + 10, y: cy + 4, "text-anchor": left ? "end" : "start", text: name }));
    }
    return root;
  });
  figure.append(legend([["on this page", "blue"], ["alternative", "red"]]));
};

for (const [name, draw] of Object.entries(charts)) {
  const holder = document.getElementById(name);
  if (holder) draw(holder);
}
