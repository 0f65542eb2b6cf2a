"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (name, className, words) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (words !== undefined) element.textContent = words;
    return element;
  };

  // Which curves are shown: one figure, one axis.
  const view = {};
  const choices = [...document.querySelectorAll("button[data-choice]")];
  const show = () => {
    for (const button of choices)
      button.setAttribute("aria-pressed", view[button.dataset.choice] === button.value);
    for (const figure of document.querySelectorAll(".curves"))
      figure.classList.toggle(
        "shown", figure.dataset.figure === view.figure && figure.dataset.axis === view.axis);
  };
  for (const button of choices) {
    view[button.dataset.choice] ??= button.value;
    button.addEventListener("click", () => { view[button.dataset.choice] = button.value; show(); });
  }
  const first = document.querySelector(".curves");
  if (first) { view.figure ??= first.dataset.figure; view.axis ??= first.dataset.axis; }
  show();

  // A recipe of the legend can be lit.
  const chips = [...document.querySelectorAll(".chip")];
  for (const chip of chips)
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") !== "true";
      for (const other of chips) other.setAttribute("aria-pressed", on && other === chip);
      document.body.classList.toggle("dim", on);
      for (const series of document.querySelectorAll(".series"))
        series.classList.toggle("lit", on && series.dataset.key === chip.value);
    });

  // What the curves say at a place.
  const nearest = (xs, x) => {
    let best = 0;
    for (let i = 1; i < xs.length; i++)
      if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  };
  const readable = (value, axis) =>
    axis === "seconds" ? `${value.toPrecision(3)} s` :
    `${value >= 1e15 ? value.toExponential(2) : Math.round(value).toLocaleString("en")} ${axis === "flops" ? "FLOP" : axis}`;
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const figure = svg.closest("figure"), chart = data[svg.dataset.chart];
    const hair = svg.querySelector(".hair"), area = svg.querySelector(".catch");
    const tip = figure.querySelector(".tip") ?? figure.appendChild(make("div", "tip"));
    const [low, high, left, right] =
      ["low", "high", "left", "right"].map((name) => Number(svg.dataset[name]));
    const hide = () => { hair.style.visibility = tip.style.visibility = "hidden"; };
    const move = (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const place = Math.min(right, Math.max(left, (event.clientX - box.left) * scale));
      const x = low + ((place - left) / (right - left)) * (high - low);
      hair.setAttribute("x1", place);
      hair.setAttribute("x2", place);
      tip.replaceChildren(make("div", "soft", readable(x, chart.axis)));
      const rows = chart.series
        .filter((each) => x >= each.x[0] && x <= each.x[each.x.length - 1])
        .map((each) => ({ each, at: nearest(each.x, x) }))
        .sort((one, other) => one.each.mean[one.at] - other.each.mean[other.at]);
      for (const { each, at } of rows.slice(0, 10)) {
        const row = make("div", each.colour);
        const width = each.half_width ? ` ± ${each.half_width[at].toPrecision(2)}` : "";
        row.append(make("span", "key", each.key), make("span", "", each.mean[at].toFixed(4) + width));
        tip.append(row);
      }
      const outer = figure.getBoundingClientRect(), x0 = place / scale + box.left - outer.left;
      const room = outer.width - tip.offsetWidth;
      const beside = x0 + 14 < room ? x0 + 14 : x0 - tip.offsetWidth - 14;
      tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
      tip.style.top = `${box.top - outer.top + 18}px`;
      hair.style.visibility = tip.style.visibility = "visible";
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", hide);
  }
})();
