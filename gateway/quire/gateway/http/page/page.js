// The playground and the live cache. No build step, no libraries: every value from a server goes into the page as text.

import { hostBar } from "./host_bar.js";
import { BlockMap, KINDS, LABELS, numbers } from "./map.js";
import { promptBar } from "./prompt_bar.js";

const RETRY_MS = 1000;
const FIGURES_S = 5;

const byId = (id) => document.getElementById(id);

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

let messages = [];
let answerBefore = null; // the id of the chat's answer before
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
  running?.abort();
  messages = [];
  answerBefore = null;
  byId("answer").replaceChildren();
  byId("usage").textContent = "";
}

// An answer's reasoning and refusal beside its text; what is empty takes no room.
function addAnswer(parent) {
  return { reasoning: addText(parent, "", "reasoning"), text: addText(parent, ""), refusal: addText(parent, "", "refusal") };
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
    ...(isChat && answerBefore ? { prompt_cache_options: { comparison_response_id: answerBefore } } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Elements that the samples' parts go to, by index.
function places(prompt) {
  const answer = byId("answer");
  if (isChat) {
    addText(answer, "user", "role");
    addText(answer, prompt, "prompt");
    addText(answer, "assistant", "role");
    return [addAnswer(answer)];
  }
  answer.replaceChildren();
  return Array.from({ length: Number(byId("n").value) }, () => {
    const sample = element("div", "", "sample");
    addText(sample, prompt, "prompt");
    answer.append(sample);
    return addAnswer(sample);
  });
}

async function generate(prompt) {
  const conversation = isChat ? messages : [];
  conversation.push({ role: "user", content: prompt });
  if (isChat) byId("prompt").value = "";
  const answers = places(prompt);
  const startedAt = performance.now();
  let firstAt = null;
  let usage = null;
  let diagnosis = null;
  let answerId = null;
  let isCut = false;
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
      diagnosis = chunk.prompt_cache_diagnostics ?? diagnosis;
      answerId = chunk.id;
      for (const choice of chunk.choices) {
        firstAt ??= performance.now();
        const { reasoning, text, refusal } = answers[choice.index];
        reasoning.textContent += choice.delta?.reasoning_content ?? "";
        text.textContent += choice.delta?.content ?? choice.text ?? "";
        refusal.textContent += choice.delta?.refusal ?? "";
        isCut ||= choice.finish_reason === "length";
      }
      scrollDown();
    }
  } catch (error) {
    if (error.name !== "AbortError") addText(byId("answer"), `\n${error.message}`, "error");
  } finally {
    const said = answers[0].text.textContent || answers[0].refusal.textContent;
    if (said) conversation.push({ role: "assistant", content: said });
    else takeBack(conversation);
    running = null;
    if (usage !== null && answers[0].text.isConnected) byId("answer").append(promptBar(usage, diagnosis));
    if (conversation === messages && usage !== null) answerBefore = answerId;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    byId("usage").textContent = describeUsage(usage, startedAt, firstAt) + (isCut ? " · cut at max_tokens" : "");
    scrollDown();
  }
}

// Puts a message that has no answer back into the input, to be changed and sent again.
function takeBack(conversation) {
  const { content } = conversation.pop();
  if (byId("prompt").value === "") byId("prompt").value = content;
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

const map = new BlockMap(byId("map"), showMap);
let pools = [];
let seen = [];
let following = null;
let chosenSequence = null;

function onBlocks({ block_count, cleared, changes }) {
  map.change(block_count - 1, cleared, changes);
  showLegend();
}

// Says what the map shows and what is pointed at.
function showMap() {
  byId("zoom").hidden = map.isWhole && map.perCell === 1;
  byId("zoom-in").disabled = map.perCell === 1;
  byId("zoom-out").disabled = byId("zoom-whole").disabled = byId("place").disabled = map.isWhole;
  Object.assign(byId("place"), {
    max: map.kinds.length - map.shown, value: map.first, ariaValueText: `from block ${numbers.format(map.first + 1)}`,
  });
  byId("zoom-text").textContent = map.isWhole ?
    `all blocks, ${map.perCell} a cell` :
    `blocks ${numbers.format(map.first + 1)} to ${numbers.format(map.first + map.shown)}` +
      (map.perCell > 1 ? `, ${map.perCell} a cell` : "");
  byId("block-text").textContent = map.describe() ?? "Point at a cell to see its blocks.";
}

function showLegend() {
  const counts = new Array(KINDS.length).fill(0);
  for (const kind of map.kinds) counts[kind] += 1;
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
  byId("host-tier").replaceChildren(...hostBar(pool.host_blocks));
  byId("keeping").replaceChildren(...(pool.keeping ?? []).map(({ tenant, blocks, limit, until }) => element("li",
    `${tenant ? `${tenant} keeps` : "kept"} ${numbers.format(blocks)} of at most ${numbers.format(limit)} blocks, ` +
      `the next until ${new Date(1000 * until).toLocaleTimeString()}`)));
  showSequences(pool);
  if (chosenSequence !== null) markTable(pool);
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
  map.choose([]);
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
  map.choose(ids);
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
byId("zoom-in").addEventListener("click", () => map.zoom(true));
byId("zoom-out").addEventListener("click", () => map.zoom(false));
byId("zoom-whole").addEventListener("click", () => map.whole());
byId("place").addEventListener("input", () => map.moveTo(Number(byId("place").value)));
follow();
