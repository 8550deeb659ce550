// The playground and the live cache. No build step, no libraries: every value from a server goes into the page as text.

const KINDS = ["free", "cached", "retired", "active", "shared", "unseen"];
const LABELS = {
  free: "free", cached: "cached", retired: "retired", active: "held by one", shared: "shared", unseen: "of other tenants",
};
const RETRY_MS = 1000;
const FIGURES_S = 5;

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en");

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// Returns the answer of a call. Throws an Error with the server's message.
async function call(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (response.ok) return response;
  if (response.status === 401) byId("key-form").hidden = false;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
}

// Yields the events of a stream of server-sent events: {event, data}.
async function* events(response) {
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const parts = (rest + text).replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").filter((line) => !line.startsWith(":")).map((line) => line.split(/: ?(.*)/s));
      const data = fields.filter(([name]) => name === "data").map(([, value]) => value).join("\n");
      if (data) yield { event: fields.find(([name]) => name === "event")?.[1] ?? "message", data };
    }
  }
}

// -- the playground ---------------------------------------------------------------------------------------------------

const messages = [];
let isChat = false;
let running = null;

function chooseTab(chat) {
  isChat = chat;
  byId("tab-chat").setAttribute("aria-selected", String(chat));
  byId("tab-completion").setAttribute("aria-selected", String(!chat));
  byId("prompt").placeholder = chat ? "A message" : "A text to go on with";
  byId("n").disabled = chat;
  clearAnswer();
}

function clearAnswer() {
  messages.length = 0;
  byId("answer").replaceChildren();
  byId("usage").textContent = "";
}

function addText(parent, text, className) {
  const part = element("span", text, className);
  parent.append(part);
  return part;
}

function scrollDown() {
  byId("answer").scrollTop = byId("answer").scrollHeight;
}

function bodyOf(prompt) {
  const seed = byId("seed").value;
  return {
    model: byId("model").value,
    max_tokens: Number(byId("max_tokens").value),
    temperature: Number(byId("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    ...(isChat ? { messages } : { prompt, n: Number(byId("n").value) }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Elements that the samples' texts go to, by index.
function places(prompt) {
  const answer = byId("answer");
  if (isChat) {
    addText(answer, "user", "role");
    addText(answer, prompt, "prompt");
    addText(answer, "assistant", "role");
    return [addText(answer, "", "sample")];
  }
  answer.replaceChildren();
  return Array.from({ length: Number(byId("n").value) }, () => {
    const sample = element("div", "", "sample");
    addText(sample, prompt, "prompt");
    answer.append(sample);
    return addText(sample, "");
  });
}

async function generate(prompt) {
  if (isChat) messages.push({ role: "user", content: prompt });
  const texts = places(prompt);
  const startedAt = performance.now();
  let firstAt = null;
  let usage = null;
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    const response = await call(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", body: JSON.stringify(bodyOf(prompt)), signal: running.signal,
    });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        firstAt ??= performance.now();
        texts[choice.index].textContent += (isChat ? choice.delta.content : choice.text) ?? "";
      }
      scrollDown();
    }
    if (isChat) byId("prompt").value = "";
  } catch (error) {
    if (error.name !== "AbortError") addText(byId("answer"), `\n${error.message}`, "error");
  } finally {
    if (isChat) messages.push({ role: "assistant", content: texts[0].textContent });
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    byId("usage").textContent = describeUsage(usage, startedAt, firstAt);
    scrollDown();
  }
}

function describeUsage(usage, startedAt, firstAt) {
  if (usage === null || firstAt === null) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const seconds = (performance.now() - firstAt) / 1000;
  const speed = seconds > 0 ? ` · ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s` : "";
  return `${numbers.format(usage.prompt_tokens)} prompt tokens, ${numbers.format(cached)} of them cached · ` +
    `${numbers.format(usage.completion_tokens)} generated · first after ${(firstAt - startedAt).toFixed(0)} ms${speed}`;
}

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
}

// -- the cache --------------------------------------------------------------------------------------------------------

const cells = { kinds: new Uint8Array(), holders: new Uint32Array(), columns: 1, size: 1, chosen: new Set(), isDirty: false };
let pools = [];
let seen = [];
let following = null;
let chosenSequence = null;

function colours() {
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("canvas").getContext("2d");
  return KINDS.map((kind) => {
    const [, light, dark] = style.getPropertyValue(`--${kind}`).match(/light-dark\((.*), (.*)\)/) ?? [];
    const value = light ? (matchMedia("(prefers-color-scheme: dark)").matches ? dark : light) : style.getPropertyValue(`--${kind}`);
    probe.fillStyle = value.trim();
    return probe.fillStyle;
  });
}

function layOut() {
  const width = byId("map").clientWidth || 600;
  const count = Math.max(1, cells.kinds.length);
  cells.size = Math.max(2, Math.min(16, Math.floor(Math.sqrt((width * 320) / count))));
  cells.columns = Math.max(1, Math.floor(width / cells.size));
  const canvas = byId("map");
  canvas.width = cells.columns * cells.size;
  canvas.height = Math.ceil(count / cells.columns) * cells.size;
  canvas.style.width = `${canvas.width}px`;
  cells.isDirty = true;
}

function draw() {
  if (cells.isDirty) {
    cells.isDirty = false;
    const context = byId("map").getContext("2d");
    const fills = colours();
    const gap = cells.size > 4 ? 1 : 0;
    context.clearRect(0, 0, byId("map").width, byId("map").height);
    for (let kind = 0; kind < KINDS.length; kind += 1) {
      context.fillStyle = fills[kind];
      for (let i = 0; i < cells.kinds.length; i += 1) {
        if (cells.kinds[i] === kind) context.fillRect(...placeOf(i), cells.size - gap, cells.size - gap);
      }
    }
    context.strokeStyle = getComputedStyle(document.body).color;
    for (const i of cells.chosen) {
      const [x, y] = placeOf(i);
      context.strokeRect(x + 0.5, y + 0.5, cells.size - gap - 1, cells.size - gap - 1);
    }
    byId("map").dataset.draws = String(Number(byId("map").dataset.draws ?? 0) + 1);
  }
  requestAnimationFrame(draw);
}

function placeOf(index) {
  return [(index % cells.columns) * cells.size, Math.floor(index / cells.columns) * cells.size];
}

// Block ids begin with 1: block 0 is nobody's.
function onBlocks({ block_count, cleared, changes }) {
  if (cleared || cells.kinds.length !== block_count - 1) {
    cells.kinds = new Uint8Array(block_count - 1);
    cells.holders = new Uint32Array(block_count - 1);
    layOut();
  }
  for (const [id, kind, holders] of changes) {
    cells.kinds[id - 1] = kind;
    cells.holders[id - 1] = holders;
  }
  cells.isDirty = true;
  showLegend();
}

function showLegend() {
  const counts = new Array(KINDS.length).fill(0);
  for (const kind of cells.kinds) counts[kind] += 1;
  byId("legend").replaceChildren(...KINDS.map((kind, i) => {
    const item = element("li");
    const mark = element("i");
    mark.style.background = `var(--${kind})`;
    item.append(mark, `${LABELS[kind]} ${numbers.format(counts[i])}`);
    item.hidden = kind === "unseen" && counts[i] === 0;
    return item;
  }));
}

function onPools(list) {
  pools = list;
  const names = list.map((pool) => pool.name);
  const select = byId("pool");
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
    if (select.value !== chosen) follow();
  }
  const now = performance.now() / 1000;
  seen = [...seen.filter(({ at }) => now - at <= FIGURES_S), { at: now, list }];
  showFigures();
}

function showFigures() {
  const pool = pools.find(({ name }) => name === byId("pool").value);
  if (!pool) return;
  byId("pool-text").textContent = `${pool.attached ? "attached" : "its worker is away"} · epoch ${pool.epoch} · ` +
    `${numbers.format(pool.block_count - 1)} blocks of ${pool.block_size} tokens`;
  const first = seen.find(({ list }) => list.some((other) => other.name === pool.name && other.epoch === pool.epoch));
  const before = first.list.find(({ name }) => name === pool.name).counters;
  const seconds = seen.at(-1).at - first.at;
  const rate = (field) => (seconds > 0 ? (pool.counters[field] - before[field]) / seconds : 0);
  const admitted = pool.counters.admitted_tokens;
  const figures = {
    "sequences": numbers.format(pool.sequence_count),
    "generated tokens/s": rate("generated_tokens").toFixed(1),
    "prompt tokens/s": rate("admitted_tokens").toFixed(1),
    "found in the cache": admitted ? `${((100 * pool.counters.cached_tokens) / admitted).toFixed(1)} %` : "–",
    "evicted blocks": numbers.format(pool.counters.evicted_blocks),
    "copied blocks": numbers.format(pool.counters.copied_blocks),
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", value));
    return box;
  }));
  showSequences(pool);
  if (chosenSequence !== null || cells.chosen.size > 0) markTable(pool);
}

function showSequences(pool) {
  byId("sequences").tBodies[0].replaceChildren(...pool.sequences.map((sequence) => {
    const row = element("tr");
    const name = `${sequence.lease}/${sequence.id}`;
    const texts = [name, sequence.tokens, sequence.cached, sequence.blocks, sequence.offloaded ? "in the host tier" : ""];
    row.append(...texts.map((text) => element("td", String(text))));
    row.classList.toggle("chosen", name === chosenSequence);
    row.addEventListener("click", () => chooseSequence(name));
    return row;
  }));
}

function chooseSequence(name) {
  chosenSequence = chosenSequence === name ? null : name;
  cells.chosen = new Set();
  cells.isDirty = true;
  showFigures();
}

// Marks the blocks of the chosen sequence's table, as they are now.
async function markTable(pool) {
  const sequence = pool.sequences.find(({ lease, id }) => `${lease}/${id}` === chosenSequence);
  let ids = [];
  if (sequence) {
    const query = new URLSearchParams({ lease: sequence.lease, id: String(sequence.id) });
    ids = await call(`live/sequence?${query}`).then((answer) => answer.json()).then(({ block_ids }) => block_ids, () => []);
  }
  cells.chosen = new Set(ids.map((id) => id - 1));
  cells.isDirty = true;
}

function describeBlock(event) {
  const box = byId("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / cells.size);
  const index = Math.floor((event.clientY - box.top) / cells.size) * cells.columns + column;
  if (column >= cells.columns || index >= cells.kinds.length) return;
  const holders = cells.holders[index] > 1 ? ` by ${cells.holders[index]} sequences` : "";
  byId("block-text").textContent = `Block ${index + 1}: ${LABELS[KINDS[cells.kinds[index]]]}${holders}`;
}

// Follows the chosen pool until another one is chosen; begins again when the stream ends.
async function follow() {
  following?.abort();
  const mine = new AbortController();
  following = mine;
  while (!mine.signal.aborted) {
    try {
      const query = new URLSearchParams({ pool: byId("pool").value });
      const response = await call(`live?${query}`, { signal: mine.signal });
      if (byId("model").options.length === 0) await listModels();
      showStatus("live");
      for await (const { event, data } of events(response)) {
        if (event === "pools") onPools(JSON.parse(data));
        if (event === "blocks") onBlocks(JSON.parse(data));
        if (event === "away") showStatus(JSON.parse(data), true);
      }
    } catch (error) {
      if (!mine.signal.aborted) showStatus(error.message, true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function showStatus(text, isAway = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("away", isAway);
}

byId("tab-completion").addEventListener("click", () => chooseTab(false));
byId("tab-chat").addEventListener("click", () => chooseTab(true));
byId("clear").addEventListener("click", clearAnswer);
byId("stop").addEventListener("click", () => running?.abort());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) generate(byId("prompt").value);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("examples").addEventListener("click", ({ target }) => {
  if (!(target instanceof HTMLButtonElement)) return;
  byId("prompt").value = target.textContent;
  byId("prompt").focus();
});
byId("key-form").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("change", () => { byId("model").replaceChildren(); follow(); });
byId("pool").addEventListener("change", follow);
byId("map").addEventListener("mousemove", describeBlock);
window.addEventListener("resize", layOut);
follow();
draw();
