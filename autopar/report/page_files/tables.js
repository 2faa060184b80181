"use strict";
// Tables of class `sortable` get a button in each heading, and a filter if they have many rows.
const FILTERED_ROWS = 8;

function sortTable(table, column, heading) {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const value = (row) => {
    const cell = row.cells[column];
    const given = cell.dataset.value;
    return given === undefined ? cell.textContent : given === "" ? null : Number(given);
  };
  const compare = (a, b) => {
    if (a === null || b === null || a === "" || b === "") {
      const empty = (x) => (x === null || x === "" ? 1 : 0);
      return empty(a) - empty(b); // empty cells stay last in both directions
    }
    const order =
      typeof a === "number" && typeof b === "number"
        ? a - b
        : String(a).localeCompare(String(b), "en", { numeric: true });
    return descending ? -order : order;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
}

function filterTable(table, text, status) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...table.tBodies[0].rows];
  let shown = 0;
  for (const row of rows) {
    const content = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
    if (!row.hidden) shown += 1;
  }
  status.textContent = `${shown} of ${rows.length} rows`;
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sortTable(table, column, heading));
  });
  if (table.tBodies[0].rows.length < FILTERED_ROWS) continue;
  const tools = document.createElement("div");
  tools.className = "tools";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter rows";
  input.setAttribute("aria-label", `Filter the rows of ${table.caption.textContent.trim()}`);
  const status = document.createElement("output");
  tools.append(input, status);
  table.closest(".scroll").before(tools);
  input.addEventListener("input", () => filterTable(table, input.value, status));
  filterTable(table, "", status);
}
