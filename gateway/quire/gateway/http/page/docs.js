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
  const heading = element("h2", path);
  heading.prepend(element("b", method.toUpperCase()));
  box.append(heading, element("p", operation.summary));
  const schema = operation.requestBody?.content["application/json"].schema;
  if (schema) box.append(fieldsOf(schema));
  return box;
}

function fieldsOf({ properties, required = [] }) {
  const table = document.createElement("table");
  table.createTHead().insertRow().append(...["field", "type", ""].map((name) => element("th", name)));
  const body = table.createTBody();
  for (const [name, schema] of Object.entries(properties)) {
    const texts = [name, kindOf(schema), required.includes(name) ? "required" : ""];
    body.insertRow().append(...texts.map((text) => element("td", text)));
  }
  return table;
}

const { paths } = await (await fetch("openapi.json")).json();
document.getElementById("endpoints").append(...Object.entries(paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => show(path, method, operation))));
