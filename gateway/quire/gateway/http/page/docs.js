// The endpoints of openapi.json. No libraries: every value goes into the page as text.

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function kindOf(schema) {
  return schema.type ?? (schema.oneOf ?? []).map(kindOf).join(" or ");
}

function show(path, method, operation) {
  const box = document.createElement("article");
  box.append(element("h3", `${method.toUpperCase()} ${path}`), element("p", operation.summary));
  const schema = operation.requestBody?.content["application/json"].schema;
  if (schema) {
    const list = document.createElement("ul");
    list.append(...Object.entries(schema.properties).map(([name, each]) =>
      element("li", `${name}: ${kindOf(each)}${schema.required.includes(name) ? ", required" : ""}`)));
    box.append(list);
  }
  return box;
}

const { paths } = await (await fetch("openapi.json")).json();
document.getElementById("endpoints").append(...Object.entries(paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => show(path, method, operation))));
