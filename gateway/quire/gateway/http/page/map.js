// The map of a pool's blocks, on one canvas. A cell holds `perCell` blocks and is filled from below by the shares of
// their kinds. Zooming in divides `perCell` by ZOOM until a cell is one block. The window is `first` and the blocks
// after it that have room on the canvas.

export const KINDS = ["free", "cached", "retired", "active", "shared", "unseen"];
export const LABELS = {
  free: "free", cached: "cached", retired: "retired", active: "held by one", shared: "shared", unseen: "of other tenants",
};
const FROM_BELOW = ["shared", "active", "retired", "cached", "unseen", "free"].map((kind) => KINDS.indexOf(kind));
const FREE = KINDS.indexOf("free");
const MIN_CELL_PX = 10; // what a pointer can meet
const MAX_CELL_PX = 16;
const HEIGHT_PX = 320;
const ZOOM = 4;
const WHEEL_PX = 80; // of a wheel's or a pinch's way for one level
const PINCH = 1.6; // the change of the fingers' distance for one level

export const numbers = new Intl.NumberFormat("en");

// Returns the smallest power of two of blocks per cell with which `count` blocks have room in `room` cells.
function perCellFor(count, room) {
  return 2 ** Math.max(0, Math.ceil(Math.log2(count / room)));
}

export class BlockMap {
  kinds = new Uint8Array();
  holders = new Uint32Array();
  #canvas;
  #onChange;
  #chosen = new Set();
  #columns = 1;
  #rows = 1;
  #size = 1;
  #perCell = 1;
  #first = 0;
  #cursor = null; // a block's index: its cell is described
  #frame = null;
  #fills = [];
  #wheel = 0;
  #fingers = new Map();
  #spread = 0;

  // Calls `onChange` after each drawing: the window or the blocks may have changed.
  constructor(canvas, onChange) {
    this.#canvas = canvas;
    this.#onChange = onChange;
    canvas.addEventListener("pointermove", (event) => this.#onMove(event));
    canvas.addEventListener("pointerdown", (event) => this.#onDown(event));
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, ({ pointerId }) => this.#fingers.delete(pointerId));
    }
    canvas.addEventListener("dblclick", (event) => this.zoom(true, this.#blockAt(event)));
    canvas.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.#fills = []; this.redraw(); });
  }

  // The window, counted from block 0, and how many blocks a cell holds.
  get first() { return this.#first; }
  get shown() { return Math.min(this.kinds.length - this.#first, this.#columns * this.#rows * this.#perCell); }
  get perCell() { return this.#perCell; }
  get isWhole() { return this.shown >= this.kinds.length; }

  // Takes blocks as they changed: [id, kind, holders]. Block ids begin with 1: block 0 is nobody's.
  change(count, isCleared, changes) {
    if (isCleared || this.kinds.length !== count) {
      const isOther = this.kinds.length !== count;
      this.kinds = new Uint8Array(count);
      this.holders = new Uint32Array(count);
      if (isOther) this.whole();
    }
    for (const [id, kind, holders] of changes) {
      this.kinds[id - 1] = kind;
      this.holders[id - 1] = holders;
    }
    this.redraw();
  }

  // Outlines the cells of these blocks.
  choose(ids) {
    this.#chosen = new Set(ids.map((id) => id - 1));
    this.redraw();
  }

  // Shows all blocks.
  whole() {
    this.#cursor = null;
    this.#perCell = 2 ** 30;
    this.#first = 0;
    this.layOut();
  }

  // Moves the window so that it begins near a block: at a multiple of `step` blocks, a row if it isn't given.
  moveTo(first, step = this.#columns * this.#perCell) {
    const last = Math.max(0, this.kinds.length - this.#columns * this.#rows * this.#perCell);
    this.#first = Math.min(Math.max(0, Math.round(first / step) * step), Math.ceil(last / step) * step);
    this.redraw();
  }

  // Divides or multiplies the blocks of a cell; the block stays where it is, as far as it can.
  zoom(isIn, block = this.#cursor ?? this.#first + Math.floor(this.shown / 2)) {
    if (block === null) return;
    const [x, y] = this.#placeOf(block);
    this.#perCell = isIn ? Math.max(1, this.#perCell / ZOOM) : this.#perCell * ZOOM;
    this.layOut();
    const row = Math.min(Math.floor(y / this.#size), this.#rows - 1);
    const column = Math.min(Math.floor(x / this.#size), this.#columns - 1);
    this.moveTo(block - (row * this.#columns + column) * this.#perCell, this.#perCell);
  }

  // The cell that is pointed at, in words; null if none is.
  describe() {
    if (this.#cursor === null || this.#cursor >= this.kinds.length) return null;
    const [from, to] = this.#rangeOf(this.#cursor);
    if (this.#perCell > 1) {
      const counts = this.#countsOf(from, to).map((count, kind) => [count, LABELS[KINDS[kind]]]);
      const parts = counts.filter(([count]) => count > 0).sort(([a], [b]) => b - a);
      return `Blocks ${numbers.format(from + 1)} to ${numbers.format(to)}: ` +
        parts.map(([count, label]) => `${numbers.format(count)} ${label}`).join(", ");
    }
    const by = this.holders[from] > 1 ? ` by ${numbers.format(this.holders[from])} sequences` : "";
    return `Block ${numbers.format(from + 1)}: ${LABELS[KINDS[this.kinds[from]]]}${by}`;
  }

  // Chooses the cells' number and size for the canvas's width and the blocks per cell.
  layOut() {
    const width = this.#canvas.parentElement.clientWidth;
    if (width === 0) return;
    this.#perCell = Math.min(this.#perCell, this.#widest(width));
    const cells = Math.max(1, Math.ceil(this.kinds.length / this.#perCell));
    this.#size = MIN_CELL_PX;
    while (this.#size < MAX_CELL_PX && cells <= this.#roomOf(width, this.#size + 1)) this.#size += 1;
    this.#columns = Math.max(1, Math.floor(width / this.#size));
    this.#rows = Math.min(Math.floor(HEIGHT_PX / this.#size), Math.ceil(cells / this.#columns));
    const scale = window.devicePixelRatio || 1;
    const [across, down] = [this.#columns * this.#size, this.#rows * this.#size];
    Object.assign(this.#canvas, { width: Math.round(across * scale), height: Math.round(down * scale) });
    Object.assign(this.#canvas.style, { width: `${across}px`, height: `${down}px` });
    this.moveTo(this.#first);
  }

  redraw() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw();
      this.#onChange();
    });
  }

  #roomOf(width, size) {
    return Math.max(1, Math.floor(width / size)) * Math.floor(HEIGHT_PX / size);
  }

  #widest(width = this.#canvas.parentElement.clientWidth) {
    return perCellFor(this.kinds.length, this.#roomOf(width, MIN_CELL_PX));
  }

  #rangeOf(block) {
    const from = block - ((block - this.#first) % this.#perCell);
    return [from, Math.min(from + this.#perCell, this.kinds.length)];
  }

  #countsOf(from, to) {
    const counts = new Array(KINDS.length).fill(0);
    for (let i = from; i < to; i += 1) counts[this.kinds[i]] += 1;
    return counts;
  }

  #draw() {
    const context = this.#canvas.getContext("2d");
    const scale = window.devicePixelRatio || 1;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    if (this.#fills.length === 0) this.#fills = this.#colours();
    const side = this.#size - 1;
    const end = this.#first + this.shown;
    for (let from = this.#first; from < end; from += this.#perCell) {
      const [x, y] = this.#placeOf(from);
      const to = Math.min(from + this.#perCell, this.kinds.length);
      context.fillStyle = this.#fills[this.#perCell === 1 ? this.kinds[from] : FREE];
      context.fillRect(x, y, side, side);
      if (this.#perCell > 1) this.#fillShares(context, x, y, side, this.#countsOf(from, to), to - from);
    }
    context.strokeStyle = getComputedStyle(this.#canvas).color;
    const outlined = new Set([...this.#chosen].map((block) => this.#placeOf(block).join()));
    for (const place of outlined) this.#outline(context, ...place.split(",").map(Number), side, 1);
    if (this.#cursor !== null) this.#outline(context, ...this.#placeOf(this.#cursor), side, 2);
    this.#canvas.dataset.draws = String(Number(this.#canvas.dataset.draws ?? 0) + 1);
  }

  // Each kind that a cell has gets a line of a pixel at least: one block among thousands can be seen.
  #fillShares(context, x, y, side, counts, total) {
    let bottom = y + side;
    for (const kind of FROM_BELOW) {
      if (kind === FREE || counts[kind] === 0) continue;
      const height = Math.min(bottom - y, Math.max(1, Math.round((counts[kind] / total) * side)));
      context.fillStyle = this.#fills[kind];
      context.fillRect(x, bottom - height, side, height);
      bottom -= height;
    }
  }

  #outline(context, x, y, side, width) {
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
  }

  #colours() {
    const probe = this.#canvas.parentElement.appendChild(document.createElement("i"));
    const fills = KINDS.map((kind) => {
      probe.style.color = `var(--${kind})`;
      return getComputedStyle(probe).color;
    });
    probe.remove();
    return fills;
  }

  #placeOf(block) {
    const cell = Math.floor((block - this.#first) / this.#perCell);
    return [(cell % this.#columns) * this.#size, Math.floor(cell / this.#columns) * this.#size];
  }

  // The first block of the cell at a place; null beside the cells.
  #blockAt({ clientX, clientY }) {
    const box = this.#canvas.getBoundingClientRect();
    const column = Math.floor((clientX - box.left) / this.#size);
    const cell = Math.floor((clientY - box.top) / this.#size) * this.#columns + column;
    const block = this.#first + cell * this.#perCell;
    return column >= 0 && column < this.#columns && cell >= 0 && block < this.kinds.length ? block : null;
  }

  #point(block) {
    if (block === null) return;
    this.#cursor = block;
    this.redraw();
  }

  #onMove(event) {
    if (this.#fingers.has(event.pointerId)) this.#fingers.set(event.pointerId, event);
    if (this.#fingers.size === 2) this.#pinch();
    else this.#point(this.#blockAt(event));
  }

  #onDown(event) {
    if (event.pointerType === "touch") this.#fingers.set(event.pointerId, event);
    this.#spread = this.#fingers.size === 2 ? this.#distance() : 0;
    this.#point(this.#blockAt(event));
  }

  #distance() {
    const [a, b] = [...this.#fingers.values()];
    return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  }

  #pinch() {
    const change = this.#distance() / this.#spread;
    if (change < PINCH && change > 1 / PINCH) return;
    this.#spread = this.#distance();
    this.zoom(change > 1);
  }

  // Without the focus a wheel scrolls the page. A pinch on a touchpad is a wheel with Ctrl.
  #onWheel(event) {
    const isIn = event.deltaY < 0;
    if (!event.ctrlKey && (document.activeElement !== this.#canvas || (isIn ? this.#perCell === 1 : this.isWhole))) return;
    event.preventDefault();
    this.#wheel += event.deltaY * (event.ctrlKey && Math.abs(event.deltaY) < 50 ? 4 : 1);
    if (Math.abs(this.#wheel) < WHEEL_PX) return;
    this.#wheel = 0;
    this.zoom(isIn, this.#blockAt(event) ?? undefined);
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.#columns * this.#perCell;
    const window = row * this.#rows;
    const steps = {
      ArrowLeft: -this.#perCell, ArrowRight: this.#perCell, ArrowUp: -row, ArrowDown: row,
      PageUp: -window, PageDown: window, Home: -this.kinds.length, End: this.kinds.length,
    };
    if (event.key in steps) this.#step(steps[event.key]);
    else if (["+", "=", "Enter"].includes(event.key)) this.zoom(true);
    else if (event.key === "-") this.zoom(false);
    else if (["0", "Escape"].includes(event.key)) this.whole();
    else return;
    event.preventDefault();
  }

  // Moves the cursor by blocks; the window follows.
  #step(blocks) {
    const from = this.#cursor ?? this.#first - (blocks > 0 ? blocks : 0);
    this.#cursor = Math.min(Math.max(0, from + blocks), this.kinds.length - 1);
    const row = this.#columns * this.#perCell;
    if (this.#cursor < this.#first) this.moveTo(this.#cursor - (this.#cursor % row));
    if (this.#cursor >= this.#first + this.shown) {
      this.moveTo(this.#cursor - (this.#cursor % row) - (this.#rows - 1) * row);
    }
    this.redraw();
  }
}
