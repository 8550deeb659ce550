// The blocks of a pool's host tier by state: a bar, and the same in words.

import { bar } from "./bar.js";
import { numbers } from "./map.js";

const WORDS = { cached: "cached", held: "of offloaded sequences", retired: "retired", free: "free" };

// Returns the elements below the map; none for a pool without a host tier.
export function hostBar(counts) {
  if (!counts) return [];
  const text = document.createElement("span");
  const words = Object.entries(WORDS).map(([name, word]) => `${numbers.format(counts[name])} ${word}`);
  text.textContent = `Host tier: ${words.join(" · ")}`;
  return [bar(counts), text];
}
