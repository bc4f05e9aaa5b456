// What the page's scripts add: hover on a destination box, a matrix cell in words, one rank's peers, zoom, search, sort.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("scripted");
  const byId = (id) => document.getElementById(id);

  function bytes(n) {
    for (const [unit, scale] of [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (n >= scale) return `${+(n / scale).toFixed(2)} ${unit}`;
    }
    return `${n} B`;
  }
  function seconds(s) {
    const [unit, scale] = s >= 1 ? ["s", 1] : s >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
    return `${+(s / scale).toPrecision(3)} ${unit}`;
  }

  // -- the two layouts -----------------------------------------------------------------------------------------------

  for (const figure of document.querySelectorAll(".figure")) {
    const feeds = data.feeds[+figure.dataset.figure];
    const sources = figure.querySelectorAll(".source .parts rect");
    const now = figure.querySelector(".now");
    const choose = (box) => {
      for (const on of figure.querySelectorAll(".on")) on.classList.remove("on");
      figure.classList.toggle("choosing", box !== null);
      now.textContent = box === null ? "" : box.querySelector("title").textContent;
      if (box === null) return;
      box.classList.add("on");
      for (const part of feeds[+box.dataset.row]) sources[part]?.classList.add("on");
    };
    for (const box of figure.querySelectorAll(".destination .boxes > g")) {
      box.addEventListener("pointerenter", () => choose(box));
      box.addEventListener("pointerleave", () => choose(document.activeElement === box ? box : null));
      box.addEventListener("focus", () => choose(box));
      box.addEventListener("blur", () => choose(null));
    }
  }
  const openTarget = () => {
    const target = /^#tensor-[0-9]+$/.test(location.hash) ? document.querySelector(location.hash) : null;
    if (target) {
      target.closest("details").open = true;
      target.scrollIntoView({ block: "center" });
    }
  };
  addEventListener("hashchange", openTarget);
  openTarget();

  // -- who sends to whom, and one rank -------------------------------------------------------------------------------

  const MOST_PEERS = 10;
  const matrix = data.matrix;
  if (matrix) {
    const columns = matrix.receivers.length;
    const sums = new Map();
    for (let at = 0; at < matrix.cells.length; at += 3) {
      sums.set(matrix.cells[at] * columns + matrix.cells[at + 1], matrix.cells[at + 2]);
    }
    const cells = byId("matrix-cells");
    const drawing = byId("matrix-drawing");
    const cellAt = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(cells.getScreenCTM().inverse());
      const [row, column] = [Math.floor(at.y), Math.floor(at.x)];
      return row >= 0 && row < matrix.senders.length && column >= 0 && column < columns ? [row, column] : null;
    };
    const show = (cell) => {
      const [row, column] = cell;
      const sum = sums.get(row * columns + column);
      byId("matrix-now").textContent =
        `${matrix.senders[row]} sends ${sum ? bytes(sum) : "nothing"} to ${matrix.receivers[column]}`;
      cells.querySelector(".cross").setAttribute("d", `M${column} ${row}h1v1h-1z`);
    };
    drawing.addEventListener("pointermove", (event) => {
      const cell = cellAt(event);
      if (cell) show(cell);
    });
    drawing.addEventListener("click", (event) => {
      const cell = cellAt(event);
      if (!cell) return;
      show(cell);
      choice.value = matrix.senders[cell[0]];
      drawRank();
    });

    const names = [...new Set([...matrix.senders, ...matrix.receivers])];
    const choice = byId("rank-choice");
    choice.append(...names.map((name) => new Option(name, name)));
    const hands = matrix.senders.find((name) => matrix.receivers.includes(name));
    if (hands) choice.value = hands; // one that both sends and receives says most
    const drawRank = () => {
      const peers = { "Sends to": [], "Receives from": [] };
      for (const [key, nbytes] of sums) {
        const [from, to] = [matrix.senders[Math.floor(key / columns)], matrix.receivers[key % columns]];
        if (from === choice.value) peers["Sends to"].push({ peer: to, nbytes });
        if (to === choice.value) peers["Receives from"].push({ peer: from, nbytes });
      }
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      byId("rank-peers").replaceChildren();
      for (const [way, fill] of [["Sends to", colour("--out")], ["Receives from", colour("--in")]]) {
        const all = d3.sort(peers[way], (row) => -row.nbytes);
        const top = all.slice(0, MOST_PEERS);
        const head = document.createElement("h3");
        head.textContent = `${way} ${all.length} ${all.length === 1 ? "peer" : "peers"}, ${bytes(d3.sum(all, (row) => row.nbytes))}`;
        const part = document.createElement("div");
        part.append(head);
        byId("rank-peers").append(part);
        if (!all.length) continue;
        part.append(Plot.plot({
          width: Math.min(620, Math.max(240, part.clientWidth)),
          height: 8 + 20 * top.length,
          marginTop: 4,
          marginBottom: 4,
          marginLeft: 14 + 7.4 * d3.max(top, (row) => row.peer.length),
          marginRight: 76,
          style: { background: "transparent", color: colour("--ink"), fontSize: "12px" },
          x: { axis: null },
          y: { type: "band", label: null, domain: top.map((row) => row.peer), tickSize: 0, padding: 0.2 },
          marks: [
            Plot.barX(top, { x: "nbytes", y: "peer", fill }),
            Plot.text(top, { x: "nbytes", y: "peer", text: (row) => bytes(row.nbytes), textAnchor: "start", dx: 5 }),
          ],
        }));
        if (top.length < all.length) {
          const more = document.createElement("p");
          more.className = "hint";
          more.textContent = `and ${all.length - top.length} more, each ${bytes(top.at(-1).nbytes)} or less`;
          part.append(more);
        }
      }
    };
    choice.addEventListener("change", drawRank);
    drawRank();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawRank);
    addEventListener("resize", drawRank);
  }

  // -- the timeline --------------------------------------------------------------------------------------------------

  const drawing = byId("timeline-drawing");
  if (drawing) {
    const bars = byId("timeline-bars");
    const ticks = byId("timeline-ticks").children;
    // In the drawing's own units: it is 1000 wide, however wide it is on the screen.
    const size = [[0, 0], [1000, drawing.viewBox.baseVal.height]];
    const zoom = d3.zoom()
      .extent(size)
      .translateExtent(size)
      .scaleExtent([1, 400])
      .filter((event) => (event.type === "wheel" ? event.ctrlKey : !event.button))
      .on("zoom", ({ transform }) => {
        bars.setAttribute("transform", `translate(${transform.x} 0) scale(${transform.k} 1)`);
        const time = transform.rescaleX(d3.scaleLinear([0, data.seconds], [0, 1000]));
        for (let at = 0; at < ticks.length; at += 1) ticks[at].textContent = seconds(time.invert(250 * at));
      });
    d3.select(drawing).call(zoom).on("dblclick.zoom", () => d3.select(drawing).call(zoom.transform, d3.zoomIdentity));
  }

  // -- the table of tensors ------------------------------------------------------------------------------------------

  // A row stands for names that differ in numbers: a word matches it if it is in one of them. Its numbers must lie in the
  // spans of the places where they stand.
  function rowHas(at, word) {
    const [parts, spans] = [data.parts[at], data.spans[at]];
    const pieces = word.split(/([0-9]+)/);
    const text = parts.map((part, i) => part + (i < spans.length ? "\u0001" : "")).join("");
    const place = (from) => text.slice(0, from).split("\u0001").length - 1;
    const find = (piece, from, spot) => {
      if (piece === pieces.length) return true;
      const wanted = pieces[piece];
      const isNumber = piece % 2 === 1;
      for (let start = from; start <= (spot ? from : text.length); start += 1) {
        if (text.startsWith(wanted, start) && find(piece + 1, start + wanted.length, true)) return true;
        if (isNumber && text[start] === "\u0001") {
          const [low, high] = spans[place(start)];
          if (+wanted >= low && +wanted <= high && find(piece + 1, start + 1, true)) return true;
        }
      }
      return false;
    };
    return pieces[0] === "" && pieces.length > 1 ? find(1, 0, false) : find(0, 0, false);
  }

  const body = document.querySelector(".families tbody");
  const rows = [...body.rows];
  const counts = rows.map((row) => +row.cells[1].dataset.value);
  const search = byId("search");
  const atFirst = byId("found").textContent;
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let [shown, tensors] = [0, 0];
    rows.forEach((row, at) => {
      const lower = row.cells[0].dataset.value.toLowerCase();
      const hit = words.every((word) => lower.includes(word) || rowHas(at, word) || row.cells[2].textContent.includes(word));
      row.hidden = !hit;
      if (hit) [shown, tensors] = [shown + 1, tensors + counts[at]];
    });
    byId("found").textContent = words.length ? `${d3.format(",")(tensors)} tensors in ${shown} of ${rows.length} rows` : atFirst;
  });
  document.querySelectorAll(".families thead th").forEach((head, at) => {
    head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") === (head.dataset.sort === "text" ? "ascending" : "descending");
      const order = (head.dataset.sort === "text") === !up ? "ascending" : "descending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const value = (row) => (head.dataset.sort === "text" ? row.cells[at].dataset.value : +row.cells[at].dataset.value);
      const sorted = [...rows].sort((a, b) => d3.ascending(value(a), value(b)));
      body.append(...(order === "ascending" ? sorted : sorted.reverse()));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
})();
