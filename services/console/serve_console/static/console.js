// The console's script: theme, times, copy buttons, charts, logs and the state of the connection. Pages work without it,
// except for charts.
"use strict";

(() => {
  const root = document.documentElement;
  const each = (selector, act, within = document) => within.querySelectorAll(selector).forEach(act);

  // Theme: light, dark, or what the system prefers (no attribute). The cookie lets the server render it at once.
  const THEMES = ["system", "light", "dark"];

  function showTheme(theme) {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    each("[data-theme-switch]", (button) => {
      button.setAttribute("aria-label", `Theme: ${theme}. Change it`);
      button.title = `Theme: ${theme}`;
    });
    drawCharts();
  }

  function keepTheme(theme) {
    const age = theme === "system" ? 0 : 31536000;
    document.cookie = `muster_theme=${theme}; path=/; max-age=${age}; samesite=lax`;
    try { localStorage.setItem("muster_theme", theme); } catch { /* storage is off; the cookie is enough */ }
  }

  function keptTheme() {
    let kept = null;
    try { kept = localStorage.getItem("muster_theme"); } catch { /* as above */ }
    return THEMES.includes(kept) ? kept : root.dataset.theme || "system";
  }

  // Times: <time class="ago" datetime="...">
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

  function words(seconds) {
    const size = Math.abs(seconds);
    if (size < 3) return "just now";
    const [length, unit] = UNITS.find(([each]) => size >= each);
    const text = `${Math.floor(size / length)} ${unit}`;
    return seconds < 0 ? `in ${text}` : `${text} ago`;
  }

  function showTimes(within = document) {
    const now = Date.now();
    each("time.ago", (time) => {
      const text = words((now - Date.parse(time.dateTime)) / 1000);
      if (time.textContent !== text) time.textContent = text;
    }, within);
  }

  // Copy buttons: data-copy has the text, or is empty for the code beside the button.
  async function copy(button) {
    const text = button.dataset.copy || button.closest(".code")?.querySelector("code")?.textContent || "";
    const done = await write(text);
    const label = button.querySelector("[data-copy-label]");
    const before = label.dataset.before ??= label.textContent;
    label.textContent = done ? "Copied" : "Could not copy";
    button.classList.toggle("copied", done);
    setTimeout(() => { label.textContent = before; button.classList.remove("copied"); }, 1600);
  }

  async function write(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { // without HTTPS there is no clipboard; selecting works everywhere
      const area = document.createElement("textarea");
      area.className = "visually-hidden";
      area.value = text;
      const focused = document.activeElement;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      focused?.focus();
      return done;
    }
  }

  // Charts: data-chart holds {times, series: [{name, values, colour}], unit, height}. Times are shown in UTC, as in logs.
  const charts = new Map(); // element → uPlot
  const current = new WeakMap(); // element → its data, once points were appended
  const POINTS_MAX = 450;
  const sizes = new ResizeObserver((changes) => changes.forEach(({ target, contentRect }) => {
    const chart = charts.get(target);
    if (chart && contentRect.width && contentRect.width !== chart.width) {
      chart.setSize({ width: contentRect.width, height: chart.height });
    }
  }));

  function colour(within, name) { // what a custom property is in the current theme
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    within.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  const shown = (value, unit) => value == null ? "–"
    : `${value.toLocaleString("en", { maximumSignificantDigits: 4 })}${unit ? ` ${unit}` : ""}`;

  // Marks: what a list with data-marks says that happened, as lines through the charts of the page. The list is its text.
  function readMarks() {
    return [...document.querySelectorAll("[data-marks] li[class]")].map((item) => ({
      at: Date.parse(item.querySelector("time")?.dateTime) / 1000,
      title: item.querySelector(".timeline-title")?.textContent.trim() ?? "",
      tone: item.className.replace("timeline-", ""),
    })).filter(({ at }) => at);
  }

  function drawMarks(chart, element) {
    const { ctx, bbox, scales: { x: { min, max } } } = chart;
    const tones = Object.fromEntries(["warn", "good", "bad", "accent"].map((tone) => [tone, colour(element, tone)]));
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { at, tone } of readMarks().reverse()) {
      if (at < min || at > max) continue;
      const left = Math.round(chart.valToPos(at, "x", true)), size = 4 * devicePixelRatio;
      ctx.strokeStyle = ctx.fillStyle = tones[tone];
      ctx.globalAlpha = .55;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(left - size, bbox.top - size);
      ctx.lineTo(left + size, bbox.top - size);
      ctx.lineTo(left, bbox.top + size);
      ctx.fill();
    }
    ctx.restore();
  }

  const MARKS_NAMED_MAX = 4;

  function nameMarks(chart) { // what is marked within some pixels of the pointer, the nearest first
    const { min, max } = chart.scales.x;
    const near = readMarks().filter(({ at }) => at >= min && at <= max)
      .map(({ at, title }) => ({ title, away: Math.abs(chart.valToPos(at, "x") - chart.cursor.left) }))
      .filter(({ away }) => away < 6).sort((one, other) => one.away - other.away);
    const more = near.length - MARKS_NAMED_MAX;
    return near.slice(0, MARKS_NAMED_MAX).map(({ title }) => ` · ${title}`).join("") + (more > 0 ? ` · ${more} more` : "");
  }

  function drawChart(element) {
    const { times, series, unit, height } = JSON.parse(element.dataset.chart);
    const data = current.get(element) ?? [times, ...series.map(({ values }) => values)];
    const axis = {
      stroke: colour(element, "muted"), font: "11px system-ui, sans-serif",
      grid: { stroke: colour(element, "line"), width: 1 }, ticks: { show: false },
    };
    const lines = series.map(({ name, colour: index }, at) => {
      const stroke = colour(element, `series-${index ?? at % 5 + 1}`);
      return {
        label: name, stroke, width: 1.5, points: { show: false },
        value: (chart, value, index, at) => shown(at == null ? chart.data?.[index]?.at(-1) : value, unit),
        dash: [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4]][at % 5],
      };
    });
    const range = (chart, low, high) => { // at least a minute, which one point alone has not
      const known = chart.data?.[0] ?? [];
      let end = known.length === 1 ? known[0] : high ?? 60;
      // What happened after the last point is seen too, unless the pointer has chosen a part.
      if (known.length && end === known.at(-1)) end = Math.max(end, ...readMarks().map(({ at }) => at));
      return [Math.min(known.length === 1 ? known[0] : low ?? 0, end - 60), end];
    };
    const at = (seconds, from, to) => new Date(seconds * 1000).toISOString().slice(from, to);
    const time = { label: "Time", value: (chart, value) => {
      if (value == null) return chart.data?.[0]?.length ? "now" : "–";
      return `${at(value, 11, 19)} UTC${nameMarks(chart)}`;
    } };
    const hours = (chart, ticks, axis, space, step) => ticks.map((tick) => !chart.data[0].length ? ""
      : step < 60 ? at(tick, 11, 19) : step < 86400 ? at(tick, 11, 16) : at(tick, 5, 10));
    const chart = new uPlot({
      width: element.clientWidth || 300, height: height || 190, series: [time, ...lines],
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      axes: [{ ...axis, size: 28, space: 80, grid: { show: false }, values: hours },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => shown(tick, unit)) }],
      scales: { x: { range }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.05] } },
      cursor: { y: false, points: { size: 6 } }, padding: [10, 8, 0, 0],
      hooks: { draw: [(chart) => drawMarks(chart, element)] },
    }, data, element);
    charts.set(element, chart);
    sizes.observe(element);
  }

  function drop(element) {
    charts.get(element)?.destroy();
    charts.delete(element);
    sizes.unobserve(element);
  }

  function drawCharts(only = () => true) {
    if (!window.uPlot) return;
    for (const element of [...charts.keys()]) if (!element.isConnected || only(element)) drop(element);
    each("[data-chart]", (element) => { if (!charts.has(element)) drawChart(element); });
  }

  // Points that came after the page: only those after the last one are new.
  function appendPoints(within) {
    each("[data-points]", (element) => {
      const points = JSON.parse(element.dataset.points);
      element.remove();
      for (const [key, [times, ...values]] of Object.entries(points)) {
        const target = document.querySelector(`[data-chart-key="${CSS.escape(key)}"]`);
        const chart = target && charts.get(target);
        if (!chart) continue;
        const last = chart.data[0].at(-1) ?? 0;
        const first = times.findIndex((time) => time > last);
        if (first < 0) continue;
        const data = chart.data.map((old, at) => [...old, ...[times, ...values][at].slice(first)].slice(-POINTS_MAX));
        current.set(target, data);
        chart.setData(data);
      }
    }, within);
  }

  // Logs stay at their end, unless scrolled up. Lines come in batches; those of a paused log wait.
  const released = new WeakSet();
  const waiting = new Map(); // id of a paused log → lines

  function takeBatches() {
    each(".log > .log-batch", (batch) => {
      const log = batch.parentElement;
      const lines = [...batch.children];
      batch.remove();
      const held = waiting.get(log.id);
      if (!held) { log.append(...lines); return; }
      held.push(...lines);
      if (held.length > 2000) held.splice(0, held.length - 2000);
      const label = document.querySelector(`[data-log-pause="${CSS.escape(log.id)}"] [data-log-pause-label]`);
      if (label) label.textContent = `Go on (${held.length === 2000 ? "2,000+" : held.length} new)`;
    });
  }

  function pauseLog(button) {
    const log = document.getElementById(button.dataset.logPause);
    const held = waiting.get(log.id);
    button.setAttribute("aria-pressed", String(!held));
    button.querySelector("[data-log-pause-label]").textContent = held ? "Pause" : "Go on";
    if (!held) { waiting.set(log.id, []); return; }
    waiting.delete(log.id);
    log.append(...held);
    released.delete(log);
    follow(log);
  }

  function follow(log) {
    while (log.childElementCount > Number(log.dataset.most || 2000)) log.firstElementChild.remove();
    if (!released.has(log)) log.scrollTop = log.scrollHeight;
  }

  document.addEventListener("scroll", ({ target }) => {
    if (!(target instanceof Element) || !target.matches(".log")) return;
    if (target.scrollHeight - target.scrollTop - target.clientHeight > 24) released.add(target);
    else released.delete(target);
  }, true);

  // The connection: elements whose stream is away, and since when. A page that is being left loses its own for a moment.
  const away = new Map();

  function showConnection() {
    for (const element of [...away.keys()]) if (!element.isConnected) away.delete(element);
    const banner = document.getElementById("connection");
    if (banner) banner.hidden = ![...away.values()].some((since) => Date.now() - since > 1500);
  }

  document.addEventListener("htmx:sseError", ({ target }) => { if (!away.has(target)) away.set(target, Date.now()); });
  document.addEventListener("htmx:sseOpen", ({ target }) => { away.delete(target); showConnection(); });
  document.addEventListener("htmx:sseClose", ({ target }) => { away.delete(target); showConnection(); });

  // The stream of a tab pauses while the tab is hidden: over HTTP/1.1 a browser has six connections for all its tabs.
  const HIDDEN_MS = 5000;

  function openStream(url) {
    const listeners = [];
    let source = null;
    let pause = 0;
    const stream = {
      onopen: null, onerror: null,
      get readyState() { return source?.readyState ?? EventSource.OPEN; }, // paused is not lost
      addEventListener(name, listener) { listeners.push([name, listener]); source?.addEventListener(name, listener); },
      removeEventListener(name, listener) {
        const at = listeners.findIndex((each) => each[0] === name && each[1] === listener);
        if (at >= 0) listeners.splice(at, 1);
        source?.removeEventListener(name, listener);
      },
      close() { document.removeEventListener("visibilitychange", onVisibility); clearTimeout(pause); source?.close(); },
    };
    function open() {
      source = new EventSource(url);
      source.onopen = (event) => stream.onopen?.(event);
      source.onerror = (event) => stream.onerror?.(event);
      for (const [name, listener] of listeners) source.addEventListener(name, listener);
    }
    function onVisibility() {
      clearTimeout(pause);
      if (document.hidden) pause = setTimeout(() => { source?.close(); source = null; }, HIDDEN_MS);
      else if (source === null) open();
    }
    document.addEventListener("visibilitychange", onVisibility);
    if (document.hidden) onVisibility();
    open();
    return stream;
  }

  if (window.htmx) htmx.createEventSource = openStream;

  function prepare(within = document) {
    if (within instanceof Element && within.matches(".log")) {
      takeBatches();
      follow(within);
      return;
    }
    showTimes(within);
    drawCharts(() => false);
    appendPoints(within);
    each(".log", follow);
    each("[data-close]", (button) => { button.hidden = false; }, within);
    each("[data-filter]", (input) => { if (input.value) filter(input); });
  }

  // At once, so that no time is seen as the server wrote it.
  document.addEventListener("htmx:sseMessage", ({ target }) => showTimes(target));
  document.addEventListener("htmx:load", ({ target }) => prepare(target.parentElement ?? document));

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button");
    if (button?.matches("[data-theme-switch]")) {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length];
      keepTheme(next);
      showTheme(next);
    } else if (button?.matches("[data-copy]")) copy(button);
    else if (button?.matches("[data-log-pause]")) pauseLog(button);
    else if (button?.matches("[data-dismiss]")) button.closest(".flash").remove();
    each("details.confirm[open]", (panel) => {
      if (!panel.contains(target) || button?.matches("[data-close]")) panel.open = false;
    });
  });

  // What a call led to comes into view where it is below its form, and the fields that it names are marked.
  document.addEventListener("htmx:afterSwap", ({ target }) => {
    if (target.id !== "outcome") return;
    const { top } = target.closest(".card").getBoundingClientRect();
    if (top < 0 || top > innerHeight * .6) target.closest(".card").scrollIntoView();
    each("form[data-send] [aria-invalid]", (input) => input.removeAttribute("aria-invalid"));
    each(".form-error a", ({ hash }) => document.getElementById(hash.slice(1))?.setAttribute("aria-invalid", "true"), target);
  });

  for (const name of ["htmx:responseError", "htmx:sendError"]) {
    document.addEventListener(name, ({ detail: { target, xhr } }) => {
      if (target?.id !== "outcome") return;
      const box = document.createElement("p");
      box.className = "form-error";
      box.setAttribute("role", "alert");
      box.textContent = xhr?.status ? `The console refused the form with status ${xhr.status}. Load the page again.`
        : "The console cannot be reached.";
      target.replaceChildren(box);
    });
  }

  // Filters: an input whose data-filter selects the rows that it hides by their first words.
  function filter(input) {
    const wanted = input.value.trim().toLowerCase();
    each(input.dataset.filter, (row) => {
      row.hidden = wanted !== "" && !row.firstElementChild?.textContent.toLowerCase().includes(wanted);
    });
  }

  document.addEventListener("input", ({ target }) => { if (target.matches?.("[data-filter]")) filter(target); });

  // Forms with data-once are sent once, however often they are clicked; a page that comes back from history can send again.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.matches("[data-once]")) return;
    if (form.dataset.sent) { event.preventDefault(); return; }
    form.dataset.sent = "true";
    event.submitter?.setAttribute("aria-disabled", "true");
  });

  window.addEventListener("pageshow", () => each("[data-sent]", (form) => {
    delete form.dataset.sent;
    each("[aria-disabled]", (button) => button.removeAttribute("aria-disabled"), form);
  }));

  document.addEventListener("keydown", ({ key, ctrlKey, metaKey, target }) => {
    const form = target.closest?.("form[data-send]");
    if (key === "Enter" && (ctrlKey || metaKey) && form) form.requestSubmit();
    if (key !== "Escape") return;
    each("details.confirm[open]", (panel) => { panel.open = false; panel.querySelector("summary").focus(); });
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts());
  showTheme(keptTheme());
  prepare();
  setInterval(() => { showTimes(); showConnection(); }, 1000);
})();
