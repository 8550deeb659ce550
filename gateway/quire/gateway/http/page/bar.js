// A bar of parts, as wide as their counts. page.css has the colours, by the parts' names.
export function bar(counts) {
  const box = document.createElement("div");
  box.className = "bar";
  box.ariaHidden = "true";
  for (const [name, count] of Object.entries(counts)) {
    const part = document.createElement("i");
    part.className = name;
    part.style.flexGrow = String(count);
    box.append(part);
  }
  return box;
}
