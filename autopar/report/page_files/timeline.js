"use strict";
// Timelines on canvases. Each draws the spans of the visible interval alone; all show the same one.
{
  const plans = DATA.plans.filter((plan) => plan.prediction?.timeline);
  const holder = document.getElementById("timelines");
  const LANE = 20;
  const HEAD = 20; // the name of a mesh
  const RULER = 22;
  const FAMILIES = {
    gemm: "blue", conv: "blue", attention: "indigo", "attention backward": "indigo", memory: "sky",
    "host copy": "green",
    all_reduce: "orange", all_gather: "yellow", reduce_scatter: "red", all_to_all: "pink",
    collective_permute: "wine", send: "wine", dispatch: "teal", wait: "orange", bubble: "grey", host: "grey",
  };
  const TASKS = { F: "blue", B: "sky", I: "sky", W: "teal", U: "green", S: "blue" };
  const IDLE = ["wait", "bubble", "host"];
  const charts = [];
  const end = Math.max(1e-6, ...plans.map((plan) => plan.prediction.timeline.microseconds));
  const view = { start: 0, end };
  let scheduled = false;

  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      for (const chart of charts) chart.draw();
    });
  }
  function setView(start, stop) {
    const length = Math.min(end * 1.02, Math.max(end * 1e-7, stop - start));
    const low = Math.min(Math.max(-0.01 * end, start), 1.01 * end - length);
    view.start = low;
    view.end = low + length;
    redraw();
  }
  const zoom = (factor, at = (view.start + view.end) / 2) =>
    setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
  const pan = (part) => {
    const length = view.end - view.start;
    setView(view.start + part * length, view.end + part * length);
  };

  class Chart {
    constructor(plan) {
      const rows = plan.prediction.timeline;
      this.rows = rows;
      this.query = "";
      this.lanes = rows.lanes.map((lane) => ({ ...lane, spans: [] }));
      for (const [lane, start, length, name, category, task, axis, busy] of rows.spans) {
        this.lanes[lane].spans.push({
          start, end: start + length, busy, name: rows.texts[name], category: rows.texts[category],
          task: rows.texts[task], axis: rows.texts[axis],
        });
      }
      for (const lane of this.lanes) {
        let latest = -Infinity; // ends increase, so that the first visible span is found by bisection
        for (const span of lane.spans) span.latest = latest = Math.max(latest, span.end);
      }
      this.layOut();
      this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label":
        `Timeline of ${plan.name}: ${count(rows.spans.length)} spans on ${rows.meshes.length} meshes in ${seconds(rows.microseconds * 1e-6)}` });
      this.output = el("output", { class: "note", "aria-live": "polite" });
      this.listen();
      const left = rows.total - rows.spans.length;
      this.note = left > 0
        ? `The ${count(left)} shortest of ${count(rows.total)} spans are left out.`
        : `${count(rows.total)} spans.`;
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    layOut() {
      let y = RULER;
      let mesh = null;
      this.heads = [];
      for (const lane of this.lanes) {
        if (lane.mesh !== mesh) {
          mesh = lane.mesh;
          this.heads.push({ y, text: this.rows.meshes[mesh] });
          y += HEAD;
        }
        lane.y = y;
        y += LANE;
      }
      this.height = y + 4;
    }

    first(lane, time) {
      let low = 0;
      let high = lane.spans.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (lane.spans[middle].latest < time) low = middle + 1;
        else high = middle;
      }
      return low;
    }

    x(time) {
      return ((time - view.start) / (view.end - view.start)) * this.width;
    }
    time(x) {
      return view.start + (x / this.width) * (view.end - view.start);
    }

    shade(span, lane) {
      if (lane.name === "tasks") {
        const phase = /^\d+([FBIWUS])/.exec(span.name);
        return phase ? TASKS[phase[1]] : "grey"; // sends and receives
      }
      return FAMILIES[span.category] || "teal";
    }
    isIdle(span, lane) {
      return lane.name === "tasks" ? this.shade(span, lane) === "grey" : IDLE.includes(span.category);
    }
    matches(span) {
      return !this.query || `${span.name} ${span.category} ${span.task} ${span.axis}`.toLowerCase().includes(this.query);
    }

    draw() {
      const { canvas, height } = this;
      const ratio = devicePixelRatio || 1;
      this.width = canvas.clientWidth;
      if (!this.width) return;
      if (canvas.width !== Math.round(this.width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(this.width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.height = `${height}px`;
      }
      const context = canvas.getContext("2d");
      const shades = {};
      const shade = (name) => (shades[name] ??= resolved(name));
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = shade("card");
      context.fillRect(0, 0, this.width, height);
      this.drawRuler(context, shade);
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      for (const lane of this.lanes) this.drawLane(context, lane, shade);
      this.drawArrows(context, shade);
      for (const head of this.heads) {
        context.fillStyle = shade("raised");
        context.fillRect(0, head.y, this.width, HEAD);
        context.fillStyle = shade("text");
        context.fillText(head.text, 6, head.y + HEAD / 2);
      }
    }

    drawRuler(context, shade) {
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      for (const time of ticks(view.start, view.end, Math.max(2, this.width / 120))) {
        const x = Math.round(this.x(time)) + 0.5;
        context.strokeStyle = shade("line");
        context.beginPath();
        context.moveTo(x, RULER);
        context.lineTo(x, this.height);
        context.stroke();
        context.fillStyle = shade("muted");
        context.fillText(seconds(time * 1e-6), x + 3, RULER / 2);
      }
    }

    drawLane(context, lane, shade) {
      const y = lane.y + 1;
      const tall = LANE - 2;
      let painted = -1;
      for (let i = this.first(lane, view.start); i < lane.spans.length; i += 1) {
        const span = lane.spans[i];
        if (span.start > view.end) break;
        const left = Math.max(-1, this.x(span.start));
        const right = Math.min(this.width + 1, this.x(span.end));
        if (right - left < 1 && Math.floor(right) === painted) continue; // several spans in a pixel
        painted = Math.floor(right);
        const wide = Math.max(0.75, right - left - (right - left > 3 ? 0.75 : 0));
        const idle = this.isIdle(span, lane);
        context.globalAlpha = !this.matches(span) ? 0.12 : idle ? 0.4 : 1;
        context.fillStyle = shade(this.shade(span, lane));
        context.fillRect(left, y, wide, tall);
        if (wide > 34) {
          context.save();
          context.beginPath();
          context.rect(left, y, wide - 3, tall);
          context.clip();
          context.globalAlpha = this.matches(span) ? 1 : 0.3;
          context.fillStyle = shade(idle ? "text" : inkOn(this.shade(span, lane)));
          context.fillText(span.name, left + 4, y + tall / 2 + 0.5);
          context.restore();
        }
      }
      context.globalAlpha = 1;
      const label = lane.name;
      const room = context.measureText(label).width;
      context.fillStyle = shade("card");
      context.globalAlpha = 0.78;
      context.fillRect(this.width - room - 9, y, room + 9, tall);
      context.globalAlpha = 1;
      context.fillStyle = shade("muted");
      context.fillText(label, this.width - room - 4, y + tall / 2 + 0.5);
    }

    drawArrows(context, shade) {
      context.strokeStyle = shade("wine");
      context.lineWidth = 1;
      const visible = this.rows.arrows.filter(([, sent, , received]) => received >= view.start && sent <= view.end);
      if (visible.length > 400) return; // too many to follow: they appear when zoomed in
      context.globalAlpha = 0.55;
      for (const [source, sent, target, received] of visible) {
        context.beginPath();
        context.moveTo(this.x(sent), this.lanes[source].y + LANE / 2);
        context.lineTo(this.x(received), this.lanes[target].y + LANE / 2);
        context.stroke();
      }
      context.globalAlpha = 1;
    }

    spanAt(event) {
      const box = this.canvas.getBoundingClientRect();
      const y = event.clientY - box.top;
      const lane = this.lanes.find((each) => y >= each.y && y < each.y + LANE);
      if (!lane) return null;
      const reach = (2 / this.width) * (view.end - view.start);
      const time = this.time(event.clientX - box.left);
      let nearest = null;
      for (let i = this.first(lane, time - reach); i < lane.spans.length; i += 1) {
        const span = lane.spans[i];
        if (span.start > time + reach) break;
        if (span.start <= time && time <= span.end) return span;
        nearest ??= span;
      }
      return nearest;
    }

    listen() {
      const { canvas } = this;
      const fingers = new Map();
      const timeAt = (event) => this.time(event.clientX - canvas.getBoundingClientRect().left);
      canvas.addEventListener("wheel", (event) => {
        if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), timeAt(event));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / this.width);
        else return; // the page scrolls
        event.preventDefault();
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
      canvas.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, event.clientX);
        canvas.setPointerCapture(event.pointerId);
        canvas.classList.add("dragged");
        hideTip();
      });
      canvas.addEventListener("pointermove", (event) => {
        const before = fingers.get(event.pointerId);
        if (before === undefined) {
          const span = this.spanAt(event);
          if (span) showTip(event, span.name, this.lines(span));
          else hideTip();
          return;
        }
        if (fingers.size === 2) {
          const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
          const distance = Math.abs(event.clientX - other);
          if (distance > 10) zoom(Math.abs(before - other) / distance, this.time((event.clientX + other) / 2 - canvas.getBoundingClientRect().left));
        } else pan((before - event.clientX) / this.width);
        fingers.set(event.pointerId, event.clientX);
      });
      for (const name of ["pointerup", "pointercancel"]) {
        canvas.addEventListener(name, (event) => {
          fingers.delete(event.pointerId);
          canvas.classList.remove("dragged");
        });
      }
      canvas.addEventListener("click", (event) => {
        const span = this.spanAt(event);
        if (span) this.output.textContent = [span.name, ...this.lines(span)].join(" · ");
      });
      canvas.addEventListener("pointerleave", hideTip);
      canvas.addEventListener("keydown", (event) => {
        const act = {
          "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
          ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), 0: () => setView(0, end),
        }[event.key];
        if (!act) return;
        event.preventDefault();
        act();
      });
    }

    lines(span) {
      // A span that stands for iterations of a loop is busy for a part of its length.
      const length = span.end - span.start;
      const busy = span.busy < 0.999 * length ? `${seconds(span.busy * 1e-6)} within ` : "";
      return [
        `${span.category}${span.task && span.task !== span.name ? ` of ${span.task}` : ""}${span.axis ? ` along ${span.axis}` : ""}`,
        `${busy}${seconds(length * 1e-6)}, from ${seconds(span.start * 1e-6)}`,
      ];
    }

    find(text) {
      this.query = text.toLowerCase();
      if (!this.query) {
        this.output.textContent = "";
        return;
      }
      const found = this.lanes.filter((lane) => lane.name !== "tasks").flatMap((lane) => lane.spans.filter((span) => this.matches(span)));
      const total = found.reduce((sum, span) => sum + span.busy, 0);
      this.output.textContent = `${count(found.length)} spans match, ${seconds(total * 1e-6)} in all`;
    }
  }

  if (holder) {
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, text, onclick: act });
    const search = el("input", { type: "search", placeholder: "Find spans", "aria-label": "Find spans by name, kind, task or axis" });
    search.addEventListener("input", () => {
      for (const chart of charts) chart.find(search.value.trim());
      redraw();
    });
    holder.append(el("div", { class: "tools" },
      button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)),
      button("←", "Move left", () => pan(-0.25)), button("→", "Move right", () => pan(0.25)),
      button("Whole step", "Show the whole step", () => setView(0, end)), search));
    for (const plan of plans) {
      const chart = new Chart(plan);
      charts.push(chart);
      const box = el("div", { class: "window" }, chart.canvas);
      holder.append(el("div", { class: "timeline" },
        plans.length > 1 ? el("h3", { text: plan.name }) : "", box,
        el("div", { class: "tools" }, el("span", { class: "note", text: chart.note }), chart.output)));
    }
    const used = new Map(charts.flatMap((chart) => chart.lanes.flatMap((lane) =>
      lane.name === "tasks" ? [] : lane.spans.map((span) => [span.category, FAMILIES[span.category] || "teal"]))));
    holder.append(legend([...used].map(([name, shade]) => [name, shade])));
    window.addEventListener("themechange", redraw);
    setView(0, end);
    holder.dataset.view = "ready";
    // For tests and the console: the visible interval in microseconds.
    window.timelineView = view;
  }
}
