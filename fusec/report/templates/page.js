// What the page does more where scripts run: find steps, move with j and k, sort tables. It reads without this.
"use strict";
const mark = () => {
  const goal = location.hash;
  for (const link of document.querySelectorAll(".rows a")) {
    link.classList.toggle("here", link.getAttribute("href") === goal);
  }
};
const find = (list) => {
  const field = document.createElement("input");
  field.className = "find";
  field.type = "search";
  field.placeholder = "Find a step by op, node or number; j and k move";
  field.setAttribute("aria-label", "Find a step");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of list.querySelectorAll("li")) {
      const text = row.textContent.toLowerCase();
      row.style.opacity = words.every((word) => text.includes(word)) ? "" : "0.18";
    }
    const first = [...list.querySelectorAll("li")].find((row) => words.length && !row.style.opacity);
    if (first) first.scrollIntoView({ block: "nearest" });
  });
  const tree = list.closest(".tree");
  const box = document.createElement("div");
  box.className = "finder";
  tree.before(box);
  box.append(field, tree);
};
const sort = (table) => {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.setAttribute("role", "button");
    head.title = "Sort by this column";
    let down = false;
    head.addEventListener("click", () => {
      down = !down;
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
};
document.querySelectorAll(".rows").forEach(find);
document.querySelectorAll("table.sorts").forEach(sort);
addEventListener("hashchange", mark);
addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || !"jk".includes(event.key)) return;
  const links = [...document.querySelectorAll(".rows a")];
  const here = links.findIndex((link) => link.classList.contains("here"));
  const next = links[here + (event.key === "j" ? 1 : -1)];
  if (!next) return;
  location.hash = next.getAttribute("href");
  next.scrollIntoView({ block: "nearest" });
});
mark();
