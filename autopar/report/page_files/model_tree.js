"use strict";
// The inputs of the step as a tree of modules, with a column of specs for each plan.
{
  const SMALL = 40; // arrays of a model that is open at first
  const ROWS = 400; // rows of a filter that are shown, with the number of others
  const plans = DATA.plans.filter((plan) => plan.plan);
  const holder = document.getElementById("tree");

  // Leaves by path; each has the values of every plan with that path, one for each stage.
  function leavesOf(role) {
    const leaves = new Map();
    plans.forEach((plan, column) => {
      for (const value of plan.plan.values) {
        if (role && value.role !== role) continue;
        if (!leaves.has(value.path)) {
          leaves.set(value.path, { path: value.path, values: plans.map(() => []) });
        }
        leaves.get(value.path).values[column].push(value);
      }
    });
    return [...leaves.values()];
  }

  function nest(leaves) {
    const root = { name: "", path: "", children: new Map(), leaves: [] };
    for (const leaf of leaves) {
      const parts = leaf.path.split("/");
      let node = root;
      parts.slice(0, -1).forEach((part, depth) => {
        if (!node.children.has(part)) {
          node.children.set(part, {
            name: part, path: parts.slice(0, depth + 1).join("/"), children: new Map(), leaves: [],
          });
        }
        node = node.children.get(part);
      });
      node.leaves.push(leaf);
    }
    return root;
  }
  const allLeaves = (node) => [
    ...node.leaves, ...[...node.children.values()].flatMap(allLeaves),
  ];

  const specText = (values) => [...new Set(values.map((value) => value.spec))].join("; ");
  const kindText = (values) =>
    [...new Set(values.map((value) => value.kind).filter(Boolean))].join("; ");
  const stageText = (values) => [...new Set(values.map((value) => value.stage))].join(", ");
  const deviceBytes = (values) => Math.max(0, ...values.map((value) => value.device_bytes));
  const staged = plans.map((plan) => plan.plan.stages.length > 1);

  function cells(leaf) {
    const texts = leaf.values.map(specText);
    const differs = new Set(texts).size > 1;
    return leaf.values.flatMap((values, column) => [
      el("td", { class: `mono${differs ? " differs" : ""}`, text: specText(values) || "–" }),
      el("td", { text: kindText(values) }),
      ...(staged[column] ? [el("td", { text: stageText(values) })] : []),
      el("td", { class: "number", text: values.length ? bytes(deviceBytes(values)) : "–" }),
    ]);
  }
  const indented = (depth, ...content) =>
    el("td", { style: `padding-left:${0.7 + 1.1 * depth}rem` }, ...content);

  function leafRow(leaf, depth, name) {
    const value = leaf.values.flat()[0];
    return el("tr", {},
      indented(depth, el("span", { class: "toggle" }), el("span", { text: name })),
      el("td", { class: "mono", text: value.array }), ...cells(leaf));
  }

  // Rows of a module; those below are made when it is first opened.
  function groupRow(node, depth) {
    const leaves = allLeaves(node);
    const toggle = el("button", { class: "toggle", type: "button", "aria-expanded": "false", text: "▸" });
    toggle.setAttribute("aria-label", `Parameters of ${node.path}`);
    const row = el("tr", { class: "group" },
      indented(depth, toggle, el("span", { text: node.name })),
      el("td", { class: "muted", text: leaves.length === 1 ? "1 array" : `${count(leaves.length)} arrays` }),
      ...plans.flatMap((plan, column) => {
        const values = leaves.flatMap((leaf) => leaf.values[column]);
        const specs = new Set(values.map((value) => value.spec));
        const total = values.reduce((sum, value) => sum + value.device_bytes, 0);
        return [
          el("td", { class: "muted", text: specs.size === 1 ? [...specs][0] : `${specs.size} specs` }),
          el("td", { class: "muted", text: [...new Set(values.map((v) => v.kind).filter(Boolean))].slice(0, 3).join("; ") }),
          ...(staged[column] ? [el("td", { text: stageText(values) })] : []),
          el("td", { class: "number", text: bytes(total) }),
        ];
      }));
    let below = null;
    const setOpen = (isOpen) => {
      if (isOpen && !below) {
        below = rowsOf(node, depth + 1);
        row.after(...below.flatMap((entry) => entry.rows()));
      }
      toggle.textContent = isOpen ? "▾" : "▸";
      toggle.setAttribute("aria-expanded", String(isOpen));
      for (const entry of below || []) entry.show(isOpen);
    };
    let isOpen = false;
    toggle.addEventListener("click", () => setOpen((isOpen = !isOpen)));
    return {
      rows: () => [row, ...(below || []).flatMap((entry) => entry.rows())],
      show: (visible) => {
        row.hidden = !visible;
        for (const entry of below || []) entry.show(visible && isOpen);
      },
    };
  }
  function rowsOf(node, depth) {
    return [
      ...[...node.children.values()].map((child) => groupRow(child, depth)),
      ...node.leaves.map((leaf) => {
        const row = leafRow(leaf, depth, leaf.path.split("/").pop());
        return { rows: () => [row], show: (visible) => (row.hidden = !visible) };
      }),
    ];
  }

  const body = el("tbody");
  const status = el("output");
  const input = el("input", { type: "search", placeholder: "Filter: path, spec, kind", "aria-label": "Filter the model by path, spec or kind of parallelism" });
  const roles = [...new Set(plans.flatMap((plan) => plan.plan.values.map((value) => value.role)))];
  const select = el("select", { "aria-label": "Role of the values" },
    ...roles.map((role) => el("option", { value: role, text: role })),
    el("option", { value: "", text: "all inputs" }));
  select.value = roles.includes("parameter") ? "parameter" : "";

  function draw() {
    const leaves = leavesOf(select.value);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) {
      const matches = leaves.filter((leaf) => {
        const text = [leaf.path, ...leaf.values.flat().flatMap((v) => [v.spec, v.kind, v.array])]
          .join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
      });
      body.replaceChildren(...matches.slice(0, ROWS).map((leaf) => leafRow(leaf, 0, leaf.path)));
      const more = matches.length > ROWS ? `, the first ${ROWS} are shown` : "";
      status.textContent = `${count(matches.length)} of ${count(leaves.length)} arrays${more}`;
      return;
    }
    const entries = rowsOf(nest(leaves), 0);
    body.replaceChildren(...entries.flatMap((entry) => entry.rows()));
    // A small model is open, and so are modules that are the only one of their level.
    for (;;) {
      const closed = body.querySelectorAll('[aria-expanded="false"]');
      if (!closed.length || (closed.length > 1 && leaves.length > SMALL)) break;
      closed.forEach((button) => button.click());
    }
    status.textContent = `${count(leaves.length)} arrays`;
  }

  if (!plans.length) {
    holder.append(el("p", { class: "muted", text: "This step was predicted without a plan." }));
  } else {
    const heads = plans.flatMap((plan, column) => [
      el("th", { scope: "col", text: plans.length > 1 ? `spec, ${plan.name}` : "spec" }),
      el("th", { scope: "col", text: "parallelism" }),
      ...(staged[column] ? [el("th", { scope: "col", text: "stage" })] : []),
      el("th", { scope: "col", class: "number", text: "per device" }),
    ]);
    holder.append(
      el("div", { class: "tools" }, input, select, status),
      el("div", { class: "scroll tall", role: "region", tabindex: "0", "aria-label": "The model with its shardings" },
        el("table", { class: "tree" },
          el("caption", { class: "quiet", text: "Inputs of the step with the spec of each plan" }),
          el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "value" }), el("th", { scope: "col", text: "array" }), ...heads)),
          body)));
    input.addEventListener("input", draw);
    select.addEventListener("change", draw);
    draw();
  }
}
