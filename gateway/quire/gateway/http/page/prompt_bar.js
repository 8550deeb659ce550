// What the prefix cache had of an answer's prompt: a bar, the same in words, and why the rest was not found.

import { bar } from "./bar.js";
import { numbers } from "./map.js";

const REASONS = {
  model_changed: "the model changed", system_changed: "the system message changed", tools_changed: "the tools changed",
  messages_changed: "a message changed", other_changed: "the template's other values changed", reset: "the cache was reset",
  evicted: "evicted", window_evicted: "a layer's window was evicted", being_computed: "another request computes it now",
  worker_restarted: "the worker restarted", other_pool: "the answer before was computed in another pool",
  other_salt: "it is under another cache_salt", other_adapter: "it is with another adapter", never_computed: "never computed",
  unknown: "evicted or never computed",
};

// Returns the reason in words; "" if all of the prompt before was found.
export function describeMiss(diagnosis) {
  if (!diagnosis || diagnosis.type === "cache_hit") return "";
  if (diagnosis.type === "comparison_response_not_found") return "the answer before is not remembered";
  const { reason, first_changed_token: token, lost_at: lostAt, reset_by: resetBy } = diagnosis.quire ?? {};
  const place = reason?.endsWith("_changed") && token !== undefined ? ` at token ${numbers.format(token)}` : "";
  const time = lostAt === undefined ? "" : ` ${numbers.format(Math.max(0, Math.round(Date.now() / 1000 - lostAt)))} s ago`;
  const by = resetBy ? ` by ${resetBy}` : "";
  return (REASONS[reason] ?? "the reason is unknown") + by + place + time;
}

// Returns the element beside an answer.
export function promptBar(usage, diagnosis) {
  const { cached_tokens: found = 0, cache_write_tokens: written = 0 } = usage.prompt_tokens_details ?? {};
  const parts = { found, written, computed: Math.max(0, usage.prompt_tokens - found - written) };
  const box = document.createElement("div");
  box.className = "prompt-bar";
  const why = describeMiss(diagnosis);
  const text = document.createElement("span");
  text.textContent = `${numbers.format(found)} found · ${numbers.format(written)} written · ` +
    `${numbers.format(parts.computed)} computed otherwise${why ? ` · not all found: ${why}` : ""}`;
  box.append(bar(parts), text);
  return box;
}
