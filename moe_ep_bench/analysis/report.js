"use strict";

// A click on a column's head sorts ascending, another turns the order round. Cells without a value stay last.
const words = new Intl.Collator("en", { numeric: true });

function keyOf(cell) {
  if (!cell) return null;
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim();
  return text === "-" ? null : text !== "" && !isNaN(text) ? Number(text) : text;
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : words.compare(String(a), String(b));
}

function sortBy(head) {
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const body = head.closest("table").tBodies[0];
  const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[head.cellIndex]) }));
  rows.sort((a, b) => (a.key === null) - (b.key === null) || (a.key === null ? 0 : sign * compare(a.key, b.key)));
  for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  body.append(...rows.map(({ row }) => row));
}

for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  head.setAttribute("aria-sort", "none");
  button.addEventListener("click", () => sortBy(head));
}
