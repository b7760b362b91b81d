"use strict";
(() => {
  const tip = document.getElementById("tip");
  const svgSpace = "http://www.w3.org/2000/svg";
  let owner = null; // the element that the tooltip describes

  const make = (name, text, className) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const hide = () => {
    tip.hidden = true;
    if (owner) {
      owner.classList.remove("shown");
      owner.removeAttribute("aria-describedby");
      owner.querySelectorAll(".cross, .ring").forEach((node) => node.remove());
    }
    owner = null;
  };
  // Beside the place if asked and there is room, else below, else above; never over the window's edge.
  const show = (node, content, box, beside = false) => {
    if (owner !== node) hide();
    owner = node;
    node.setAttribute("aria-describedby", "tip");
    tip.replaceChildren(...content);
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const room = document.documentElement.clientWidth;
    let left = Math.min(Math.max(8, (box.left + box.right - width) / 2), Math.max(8, room - width - 8));
    let top = box.bottom + 8;
    const lowest = window.innerHeight - height - 4;
    const aside = [box.right + 12, box.left - 12 - width].find((x) => x >= 8 && x + width <= room - 8);
    if (beside && aside !== undefined) [left, top] = [aside, Math.max(4, Math.min(top - height / 2, lowest))];
    else if (top > lowest) top = Math.max(4, Math.min(box.top - height - 8, lowest));
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  };

  // Perturbed tokens: the mixture. Tab reaches the first of a response, arrows the others.
  const showToken = (node) => {
    const data = JSON.parse(node.dataset.tip);
    const table = make("table");
    for (const [text, weight, share] of data.mixture) {
      const row = table.insertRow();
      row.append(make("td", text), make("td", weight), make("td", undefined, "room"));
      const bar = make("span", undefined, "bar");
      bar.style.width = `${100 * share}%`;
      row.cells[2].append(bar);
    }
    const notes = data.notes.map((note) => make("div", note, "dim"));
    const title = make("div");
    title.append(make("b", data.title), make("span", data.mixture.length ? " was fed as" : " was fed with noise", "dim"));
    const boxes = node.getClientRects();
    show(node, [title, table, ...notes], boxes[0] || node.getBoundingClientRect());
    node.classList.add("shown");
  };
  // Focus may scroll the page: the tooltip of a focused token goes with it.
  const follow = () => {
    if (owner && owner === document.activeElement && owner.matches(".tok")) showToken(owner);
    else hide();
  };
  for (const answer of document.querySelectorAll(".tokens")) {
    const tokens = [...answer.querySelectorAll(".tok")];
    tokens.slice(1).forEach((node) => { node.tabIndex = -1; });
    answer.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = tokens[tokens.indexOf(document.activeElement) + step];
      if (!step || !document.activeElement.classList.contains("tok")) return;
      event.preventDefault();
      if (!next) return;
      document.activeElement.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    const notes = JSON.parse(answer.dataset.notes || "[]");
    for (const name of ["pointerover", "focusin", "click"]) {
      answer.addEventListener(name, (event) => {
        const node = event.target.closest(".tok");
        const plain = event.target.closest("i");
        if (node) showToken(node);
        else if (plain) {
          const lines = notes[[...answer.children].indexOf(plain)] || [];
          if (lines.length) show(plain, lines.map((line) => make("div", line)), plain.getClientRects()[0] || plain.getBoundingClientRect());
        }
        else if (owner && answer.contains(owner)) hide();
      });
    }
    answer.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    answer.addEventListener("focusout", hide);
    answer.addEventListener("scroll", follow, { passive: true });
  }

  // Rows that say more: their lines, the first one in bold.
  for (const row of document.querySelectorAll("[data-hint]")) {
    const read = () => {
      const lines = JSON.parse(row.dataset.hint).map((line, i) => make("div", line, i ? "" : "strong"));
      show(row, lines, row.getBoundingClientRect());
    };
    for (const name of ["pointerenter", "focus", "click"]) row.addEventListener(name, read);
    row.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    row.addEventListener("blur", hide);
  }

  // Bars of rewards: one that is chosen leaves the responses with its reward, in every prompt of its step.
  for (const step of document.querySelectorAll(".step")) {
    const bars = [...step.querySelectorAll(".tally")];
    for (const bar of bars) {
      bar.addEventListener("click", () => {
        const chosen = bar.getAttribute("aria-pressed") !== "true";
        for (const other of bars) other.setAttribute("aria-pressed", String(chosen && other === bar));
        for (const answer of step.querySelectorAll(".answer")) {
          answer.classList.toggle("off", chosen && answer.dataset.in !== bar.dataset.bar);
        }
        for (const group of step.querySelectorAll(".problem")) {
          const left = group.querySelectorAll(".answer:not(.off)").length;
          group.classList.toggle("off", !left);
          if (chosen && left) group.open = true;
        }
      });
    }
  }

  // Charts: the nearest step or point under the pointer, or the next one by arrow key.
  const hidden = new Set();
  for (const plot of document.querySelectorAll(".plot")) {
    const data = JSON.parse(plot.dataset.chart);
    const svg = plot.querySelector("svg");
    const view = svg.viewBox.baseVal;
    let at = -1;
    const scale = () => svg.getBoundingClientRect().width / view.width;
    const draw = (className, path) => {
      const node = document.createElementNS(svgSpace, "path");
      node.setAttribute("class", className);
      node.setAttribute("d", path);
      svg.append(node);
    };
    const showAt = (x, y, content) => {
      const frame = svg.getBoundingClientRect();
      const [left, top] = [frame.left + x * scale(), frame.top + y * scale()];
      show(plot, content, { left, right: left, top: top - 6, bottom: top + 6 }, data.kind === "lines");
    };
    const read = (index) => {
      at = index;
      plot.querySelectorAll(".cross, .ring").forEach((node) => node.remove());
      if (data.kind === "points") {
        const [x, y, , lines] = data.points[index];
        draw("ring", `M${x - 7} ${y}a7 7 0 1 0 14 0a7 7 0 1 0 -14 0Z`);
        showAt(x, y, lines.map((line, i) => make(i ? "div" : "b", line)));
        return;
      }
      const x = data.x[index];
      const known = data.series.filter(([id, , ys]) => !hidden.has(id) && ys[index] !== null);
      const table = make("table");
      for (const [, name, , texts] of [...known].sort((a, b) => a[2][index] - b[2][index])) {
        table.insertRow().append(make("td", name), make("td", texts[index]));
      }
      draw("cross", `M${x} 30V${view.height - 46}`);
      for (const [, , ys] of known) draw("ring", `M${x - 2} ${ys[index]}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0Z`);
      const lowest = known.length ? Math.max(...known.map(([, , ys]) => ys[index])) : view.height / 2;
      showAt(x, lowest, [make("b", data.labels[index]), table]);
    };
    const shownPoints = () => data.points.map((point, i) => i).filter((i) => !hidden.has(data.points[i][2]));
    const nearest = (event) => {
      const frame = svg.getBoundingClientRect();
      const [x, y] = [(event.clientX - frame.left) / scale(), (event.clientY - frame.top) / scale()];
      if (data.kind === "lines") {
        return data.x.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(data.x[best] - x) ? i : best), 0);
      }
      const away = (i) => Math.hypot(data.points[i][0] - x, data.points[i][1] - y);
      const found = shownPoints().sort((a, b) => away(a) - away(b))[0];
      return found !== undefined && away(found) < 30 ? found : -1;
    };
    const point = (event) => {
      const index = nearest(event);
      if (index < 0) { if (owner === plot) hide(); } else read(index);
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const places = data.kind === "lines" ? data.x.map((_, i) => i) : shownPoints();
      if (!places.length) return;
      const now = places.indexOf(at);
      read(places[now < 0 ? (step > 0 ? 0 : places.length - 1) : Math.min(Math.max(now + step, 0), places.length - 1)]);
    });
  }

  // Legends: an arm is shown or hidden in every chart at once.
  const keys = document.querySelectorAll("[data-toggle]");
  for (const key of keys) {
    key.addEventListener("click", () => {
      const id = Number(key.dataset.toggle);
      const off = !hidden.delete(id);
      if (off) hidden.add(id);
      for (const other of keys) if (Number(other.dataset.toggle) === id) other.setAttribute("aria-pressed", String(!off));
      for (const node of document.querySelectorAll(`[data-s="${id}"]`)) node.classList.toggle("off", off);
    });
  }

  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".tok, .plot, .hint")) hide(); });
  window.addEventListener("scroll", follow, { passive: true });
  window.addEventListener("beforeprint", () => {
    hide();
    document.querySelectorAll("details").forEach((node) => { node.open = true; });
  });
})();
