"use strict";
// Keeps the page current, and applies the selected runs, the smoothing and the scales. They are in the address, so a
// bookmark or a reload shows the same.
{
  const REFRESH_MS = 5000;
  const REST_MS = 80;
  const byId = id => document.getElementById(id);
  const query = new URLSearchParams(location.search);
  let timer = null;
  let request = null;

  function say(text, isLost) {
    byId("state").textContent = text;
    byId("state").className = isLost ? "lost" : "";
  }

  // Replaces the parts that changed, and keeps the focus.
  function update(html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const focused = document.activeElement ? document.activeElement.id : "";
    for (const part of fresh.content.children) {
      const shown = byId(part.id);
      if (shown.innerHTML === part.innerHTML) continue;
      const list = shown.querySelector(".runs");
      const top = list ? list.scrollTop : 0;
      shown.replaceChildren(...part.childNodes);
      if (list) shown.querySelector(".runs").scrollTop = top;
    }
    if (focused && byId(focused)) byId(focused).focus({preventScroll: true});
  }

  async function refresh() {
    clearTimeout(timer);
    if (request) request.abort();
    const own = request = new AbortController();
    try {
      const response = await fetch("body?" + query, {signal: own.signal});
      if (!response.ok) throw new Error(`status ${response.status}`);
      update(await response.text());
      say("updated " + new Date().toLocaleTimeString(), false);
    } catch (error) {
      if (own.signal.aborted) return;
      say("no answer from the server; what is shown is old", true);
    }
    timer = setTimeout(refresh, REFRESH_MS);
  }

  function apply(name, values) {
    query.delete(name);
    for (const value of values) query.append(name, value);
    history.replaceState(null, "", "?" + query);
    // A slider that is moved asks once, when it rests.
    clearTimeout(timer);
    timer = setTimeout(refresh, REST_MS);
  }

  byId("list").addEventListener("change", () => {
    const names = [...byId("list").querySelectorAll("input:checked")].map(box => box.value);
    apply("run", names.length ? names : [""]);
  });
  byId("smoothing").addEventListener("input", event => {
    byId("weight").textContent = Number(event.target.value).toFixed(2);
    apply("smoothing", [event.target.value]);
  });
  byId("charts").addEventListener("click", event => {
    const button = event.target.closest("button.log");
    if (!button) return;
    const logarithmic = new Set(query.getAll("log"));
    if (!logarithmic.delete(button.value)) logarithmic.add(button.value);
    apply("log", logarithmic);
  });
  timer = setTimeout(refresh, REFRESH_MS);
}
