"use strict";
// Shows the values under the pointer: a line at the nearest iteration, and the value of each run there.
{
  const SVG = "http://www.w3.org/2000/svg";
  const readout = document.createElement("div");
  readout.id = "readout";
  readout.hidden = true;
  document.body.append(readout);
  let line = null;

  function pairs(text) {
    return text ? text.split(" ").map(pair => pair.split(":").map(Number)) : [];
  }

  function nearest(points, iteration) {
    let best = points[0];
    for (const point of points) {
      if (Math.abs(point[0] - iteration) < Math.abs(best[0] - iteration)) best = point;
    }
    return best;
  }

  function brief(value) {
    return String(Number(value.toPrecision(5)));
  }

  function hide() {
    readout.hidden = true;
    if (line) line.remove();
    line = null;
  }

  function row(series, label, point, average) {
    const shown = document.createElement("div");
    shown.className = "of-run";
    const name = document.createElement("span");
    const key = document.createElement("span");
    key.className = "key " + series.classList[1];
    name.append(key, label);
    const value = document.createElement("span");
    value.textContent = average ? `${brief(average[1])} (${brief(point[1])})` : brief(point[1]);
    shown.append(name, value);
    return shown;
  }

  // The attribute data-axes has the left, right, bottom and top edge of the axes, and the lowest and highest iteration.
  function show(svg, event) {
    const [left, right, bottom, top, low, high] = svg.dataset.axes.split(" ").map(Number);
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = low + (x - left) / (right - left) * (high - low);
    const found = [...svg.querySelectorAll(".series")].map(series => {
      const point = nearest(pairs(series.dataset.values), wanted);
      return {series, point, average: nearest(pairs(series.dataset.averages), point[0])};
    });
    if (!found.length) return;
    const at = nearest(found.map(each => each.point), wanted)[0];
    const near = found.filter(each => Math.abs(each.point[0] - at) <= (high - low) / 50);
    const title = document.createElement("b");
    title.textContent = `iteration ${at}`;
    readout.replaceChildren(title, ...near.map(each => row(each.series, each.series.dataset.label, each.point, each.average)));
    readout.hidden = false;
    const size = readout.getBoundingClientRect();
    const readoutLeft = event.clientX + 16 + size.width > innerWidth ? event.clientX - 16 - size.width : event.clientX + 16;
    // Next to the pointer, or above the chart if there is no space.
    const readoutTop = readoutLeft < 0 ? box.top - size.height : event.clientY - size.height / 2;
    readout.style.left = Math.max(4, readoutLeft) + "px";
    readout.style.top = Math.min(Math.max(4, readoutTop), innerHeight - size.height - 4) + "px";
    if (!line || line.ownerSVGElement !== svg) {
      if (line) line.remove();
      line = document.createElementNS(SVG, "path");
      line.setAttribute("class", "crosshair");
      svg.append(line);
    }
    line.setAttribute("d", `M${left + (at - low) / (high - low) * (right - left)} ${bottom}V${top}`);
  }

  function follow(event) {
    const svg = event.target instanceof Element ? event.target.closest("svg.chart") : null;
    if (svg) show(svg, event); else hide();
  }

  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, {passive: true});
}
