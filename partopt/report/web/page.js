"use strict";
// What a page cannot do is shown on it, and told to who drives the browser.
window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });

// Pictures: the wheel zooms around the pointer, dragging moves, a double click shows all.
for (const svg of document.querySelectorAll("figure.zoom > svg")) {
  const whole = svg.viewBox.baseVal;
  const all = [whole.x, whole.y, whole.width, whole.height];
  let view = [...all];
  const show = () => svg.setAttribute("viewBox", view.join(" "));
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // else the page scrolls
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const factor = Math.exp(event.deltaY * 0.002);
    const at = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const size = Math.min(all[2], Math.max(all[2] / 60, view[2] * factor)) / view[2];
    for (const axis of [0, 1]) {
      view[axis] += at[axis] * view[axis + 2] * (1 - size);
      view[axis + 2] *= size;
    }
    show();
  }, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    held = [event.clientX, event.clientY];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held) return;
    const box = svg.getBoundingClientRect();
    view[0] -= (event.clientX - held[0]) / box.width * view[2];
    view[1] -= (event.clientY - held[1]) / box.height * view[3];
    held = [event.clientX, event.clientY];
    show();
  });
  svg.addEventListener("pointerup", () => { held = null; });
  svg.addEventListener("dblclick", () => { view = [...all]; show(); });
}

// The timeline. Times are whole numbers of `tick_s`; rows begin with the lowest rank.
function drawTimeline(data, [begin, end], canvas, tip) {
  const LEFT = 46, TOP = 22, BOTTOM = 4;
  const rows = data.ranks, height = Math.max(9, Math.min(26, Math.floor(640 / rows.length)));
  const context = canvas.getContext("2d");
  let from = begin, to = end, width = 0, pointer = null;

  const x = (time) => LEFT + (time - from) / (to - from) * (width - LEFT);
  const time = (pixel) => from + (pixel - LEFT) / (width - LEFT) * (to - from);

  function seconds(ticks, step) {
    const value = ticks * data.tick_s;
    const [unit, factor] = [["s", 1], ["ms", 1e3], ["µs", 1e6]].find((each) => end * data.tick_s * each[1] >= 2)
      || ["ns", 1e9];
    const digits = step ? Math.max(0, -Math.floor(Math.log10(step * data.tick_s * factor) + 1e-9)) : 3;
    return `${(value * factor).toFixed(Math.min(digits, 6))} ${unit}`;
  }

  function axis() {
    const rough = (to - from) * data.tick_s / Math.max(2, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) / data.tick_s;
    context.fillStyle = "#6a6a6a";
    context.strokeStyle = "#e6e6e6";
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const place = Math.round(x(at)) + 0.5;
      context.beginPath();
      context.moveTo(place, TOP - 4);
      context.lineTo(place, TOP + rows.length * height);
      context.stroke();
      const text = seconds(at, step), half = context.measureText(text).width / 2;
      if (place - half > LEFT - 8 && place + half < width) context.fillText(text, place, 13);
    }
  }

  // the first action that ends after `at`; ends ascend, but for the second of two at once
  function first(row, at) {
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.length[middle] <= at) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }

  function box(row, n, top) {
    const inner = height > 12 ? 2 : 1, full = height - 2 * inner, pair = row.pair[n];
    return [top + inner + (pair === 2 ? full / 2 : 0), pair ? full / 2 : full];
  }

  function drawRow(row, top) {
    context.fillStyle = "#efefef";
    context.fillRect(LEFT, top + 1, width - LEFT, height - 2);
    let last = -1;
    for (let n = first(row, from); n < row.start.length && row.start[n] < to; n++) {
      const begin = Math.max(LEFT, x(row.start[n])), end = Math.min(width, x(row.start[n] + row.length[n]));
      if (end <= LEFT || (end < last + 0.4 && row.pair[n] === 0)) continue; // within the last pixel
      last = end;
      const [y, tall] = box(row, n, top), wide = Math.max(0.4, end - begin);
      const kind = data.kinds[row.kind[n]];
      context.fillStyle = kind.colours[row.chunk[n] % 2];
      context.fillRect(begin, y, wide > 3 ? wide - 0.6 : wide, tall);
      const name = String(row.microbatch[n]);
      if (kind.numbered && tall > 8 && wide > 6 + 6 * name.length) {
        context.fillStyle = kind.ink[row.chunk[n] % 2];
        context.textAlign = "center";
        context.fillText(name, (begin + end) / 2, y + tall / 2 + 3.5);
      }
    }
    context.fillStyle = data.allreduce;
    for (const [begin, end] of row.exchanges) {
      if (end < from || begin > to) continue;
      const left = Math.max(LEFT, x(begin));
      context.fillRect(left, top + height - 4, Math.max(0.5, Math.min(width, x(end)) - left), 3);
    }
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1, tall = TOP + rows.length * height + BOTTOM;
    width = canvas.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.height = `${tall}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, tall);
    context.font = "11px system-ui, sans-serif";
    axis();
    rows.forEach((row, place) => {
      const top = TOP + place * height;
      drawRow(row, top);
      if (height >= 12 || place % 2 === 0) {
        context.fillStyle = "#333";
        context.textAlign = "right";
        context.fillText(String(row.rank), LEFT - 8, top + height / 2 + 4);
      }
    });
    canvas.dataset.drawn = String(rows.length);
  }

  function find(event) {
    const area = canvas.getBoundingClientRect();
    const place = Math.floor((event.clientY - area.top - TOP) / height), row = rows[place];
    if (!row || event.clientX - area.left < LEFT) return null;
    const at = time(event.clientX - area.left), down = event.clientY - area.top;
    for (let n = first(row, at); n < row.start.length && row.start[n] <= at; n++) {
      const [y, tall] = box(row, n, TOP + place * height);
      const over = row.pair[n] === 0 || (down >= y && down <= y + tall);
      if (at < row.start[n] + row.length[n] && over) return [row, n];
    }
    return null;
  }

  function tell(event) {
    const found = find(event);
    tip.hidden = !found;
    if (!found) return;
    const [row, n] = found, kind = data.kinds[row.kind[n]], area = canvas.getBoundingClientRect();
    const what = kind.numbered ? `${kind.word} of microbatch ${row.microbatch[n]}` : kind.word;
    tip.textContent = `rank ${row.rank}, stage ${row.stages[row.chunk[n]]}: ${what}\n`
      + `${seconds(row.length[n])}, from ${seconds(row.start[n])}`;
    const left = event.clientX - area.left + 14;
    tip.style.left = `${Math.max(0, Math.min(left, width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - area.top + 16}px`;
  }

  function move(left, right) {
    const span = Math.min(end - begin, Math.max(20, right - left));
    from = Math.max(begin, Math.min(left, end - span));
    to = from + span;
    draw();
  }
  const zoom = (factor, at) => move(at - (at - from) * factor, at + (to - at) * factor);

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.002), time(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    pointer = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { pointer = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (pointer !== null) {
      const shift = (pointer - event.clientX) / (width - LEFT) * (to - from);
      pointer = event.clientX;
      move(from + shift, to + shift);
    }
    tell(event);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => move(begin, end));
  canvas.addEventListener("keydown", (event) => {
    const middle = (from + to) / 2, step = (to - from) / 5;
    const keys = {
      "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle), "-": () => zoom(1 / 0.6, middle),
      ArrowLeft: () => move(from - step, to - step), ArrowRight: () => move(from + step, to + step),
      0: () => move(begin, end),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("resize", draw);
  draw();
}

const content = document.getElementById("data");
if (content) {
  const data = JSON.parse(content.textContent);
  document.querySelectorAll(".canvas").forEach((box, place) => {
    drawTimeline(data, data.windows[place], box.querySelector("canvas"), box.querySelector(".tip"));
  });
}
document.body.dataset.ready = "yes";
