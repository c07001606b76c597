"use strict";
// Makes the cards of a page of findings. All texts are set as text, never as markup.

const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const sprites = document.getElementsByClassName("sprite"); // they come after this script
const urls = []; // of sprites that have been looked at
const ticks = new Map(); // new labels by the number of the sample among data.samples
let section = 0; // what is shown
let chosen = []; // its cards that the filter lets through
let made = 0; // how many of them are on the page
let isSaved = true;

const BATCH = 24; // cards that are made together, when the end of the page comes near

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = visible(text);
  return made;
}

// Characters that no one sees, or that turn the direction of reading, are written as their codes.
function visible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// Pictures: a tile of a sprite, which is decoded when its first tile is shown.

function spriteUrl(number) {
  if (!urls[number]) {
    const bytes = Uint8Array.from(atob(sprites[number].textContent), (one) => one.charCodeAt(0));
    urls[number] = URL.createObjectURL(new Blob([bytes], {type: data.kind}));
  }
  return urls[number];
}

// Cards are made while the sprites are still being read: a sprite is whole when the next one has begun.
function showSprite(made, number) {
  if (document.readyState !== "loading" || sprites[number + 1]) made.style.backgroundImage = `url(${spriteUrl(number)})`;
  else document.addEventListener("DOMContentLoaded", () => showSprite(made, number), {once: true});
}

function tile(sample) {
  const set = data.sets[sample.set];
  const made = element("div", set.small ? "tile small" : "tile");
  const place = sample.tile % set.each;
  const down = Math.ceil(set.each / set.across);
  const column = place % set.across;
  const row = Math.floor(place / set.across);
  made.style.aspectRatio = `${set.width} / ${set.height}`;
  showSprite(made, set.first + Math.floor(sample.tile / set.each));
  // A tile may be wider and higher than its picture: sprites are compressed in blocks.
  made.style.backgroundSize = `${100 * set.across * set.tileWidth / set.width}% ${100 * down * set.tileHeight / set.height}%`;
  const left = set.across * set.tileWidth - set.width;
  const top = down * set.tileHeight - set.height;
  made.style.backgroundPosition = `${left ? 100 * column * set.tileWidth / left : 0}% ${top ? 100 * row * set.tileHeight / top : 0}%`;
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", visible(`${sample.path}, ${sample.label}`));
  return made;
}

// Cards.

function side(number, suggestion, isMixed) {
  const sample = data.samples[number];
  const made = element("div", "side");
  made.dataset.sample = number;
  made.append(tile(sample), element("span", "label", sample.label || "unlabelled"), element("span", "path", sample.path));
  if (sample.original) made.append(element("span", "path", sample.original));
  if (isMixed) made.append(element("span", "path", `in ${data.sets[sample.set].name}`));
  if (!data.sets[sample.set].canCorrect) return made;
  const change = element("div", "change");
  const tick = element("input");
  tick.type = "checkbox";
  tick.title = "put it into the table";
  const field = element("input");
  field.type = "text";
  field.value = ticks.get(number) ?? suggestion;
  field.title = "its new label";
  field.placeholder = "new label";
  if (data.sets[sample.set].classes.length) field.setAttribute("list", "classes");
  tick.addEventListener("change", () => setTick(number, tick.checked ? field.value : null));
  field.addEventListener("input", () => setTick(number, field.value));
  change.append(tick, field);
  made.append(change);
  return made;
}

function card(finding) {
  const made = element("article", "card");
  made.tabIndex = -1;
  const sides = element("div", "sides");
  const isMixed = new Set(finding.samples.map((number) => data.samples[number].set)).size > 1;
  finding.samples.forEach((number, at) => sides.append(side(number, finding.labels[at], isMixed)));
  sides.addEventListener("click", (event) => {
    if (event.target.closest(".tile")) made.classList.toggle("large");
    if (!made.classList.contains("large")) made.classList.remove("over");
  });
  made.append(element("div", "fact", finding.text), sides);
  return made;
}

function labelsOf(number, text) {
  const {separator, classes} = data.sets[data.samples[number].set];
  if (!separator) return [text];
  const names = partNames(text, separator);
  const isWhole = classes.includes(text) && !names.every((name) => classes.includes(name));
  return isWhole ? [text] : names;
}

// Like redact.part_names and redact.join_names: among several classes of one sample, some names have a mark before them.

// What Python takes for white space.
const SPACE = "\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const ENDS = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g");
const UNLIKE_NAMES = new RegExp(`[%;${SPACE}]`, "g");

function partNames(text, separator) {
  const parts = text.split(separator).map((part) => part.replace(ENDS, "")).filter((part) => part);
  return parts.map((part) => part.startsWith("name:") ? unquoted(part.slice(5)) : part);
}

function unquoted(text) {
  return text.replace(/(?:%[0-9a-f]{2})+/gi, (bytes) => decodeURIComponent(bytes));
}

function joinNames(names, separator) {
  return names.map((name) => {
    const isOdd = name.includes(separator) || name !== name.replace(ENDS, "") || !name || name.startsWith("name:");
    return isOdd ? `name:${name.replace(UNLIKE_NAMES, (one) => encodeURIComponent(one))}` : name;
  }).join(separator);
}

function written(number, text) {
  const {separator} = data.sets[data.samples[number].set];
  return separator ? joinNames(labelsOf(number, text), separator) : text;
}

// Whether relabel takes a new label of a sample.
function isLabel([number, text]) {
  const set = data.sets[data.samples[number].set];
  if (set.isNumber) return text.trim() !== "" && Number.isFinite(Number(text));
  return labelsOf(number, text).every((name) => set.classes.includes(name));
}

function setTick(number, label) {
  if (label === null) ticks.delete(number);
  else ticks.set(number, label);
  isSaved = false;
  refresh();
}

// Show everywhere what is ticked, as a sample may be on several cards.
function refresh() {
  for (const made of document.querySelectorAll(".side")) showTick(made);
  const right = [...ticks].filter(isLabel).length;
  const wrong = ticks.size - right;
  find("ticked").textContent = `${right || "nothing"} ticked${wrong ? `, ${wrong} with no such label` : ""}`;
  find("download").disabled = !right;
}

function showTick(made) {
  const number = Number(made.dataset.sample);
  const [tick, field] = made.querySelectorAll("input");
  if (!tick) return;
  const label = ticks.get(number);
  made.classList.toggle("ticked", label !== undefined);
  tick.checked = label !== undefined;
  if (label !== undefined && field.value !== label) field.value = label;
  field.setCustomValidity(label !== undefined && !isLabel([number, label]) ? "there is no such label" : "");
}

function more() {
  const cards = chosen.slice(made, made + BATCH).map(card);
  made += cards.length;
  find("cards").append(...cards);
  cards.forEach((each) => each.querySelectorAll(".side").forEach(showTick));
}

function show(number) {
  section = number;
  const current = data.sections[section];
  const name = find("filter").value;
  const isIn = (finding) => finding.samples.some((each) => labelsOf(each, data.samples[each].label).includes(name));
  chosen = name ? current.cards.filter((finding) => isIn(finding) || finding.labels.includes(name)) : current.cards;
  made = 0;
  find("cards").replaceChildren();
  find("cards").style.setProperty("--card-width", current.isPair ? "340px" : "190px");
  find("note").textContent = current.note;
  find("shown").textContent = chosen.length === current.cards.length ? "" : `${chosen.length} of them have this class.`;
  [...find("tabs").children].forEach((tab, at) => tab.setAttribute("aria-selected", at === section));
  more();
  watchEnd();
}

const watcher = new IntersectionObserver(([end]) => {
  if (!end.isIntersecting || made >= chosen.length) return;
  more();
  watchEnd();
}, {rootMargin: "800px"});

// The watcher reports only changes, and the end of the page may still be in view: watch it anew.
function watchEnd() {
  watcher.unobserve(find("end"));
  watcher.observe(find("end"));
}

// The table.

const D = "[0-9]+(?:_[0-9]+)*";
const NUMBER = new RegExp(`^\\s*[+-]?(?:inf(?:inity)?|nan|(?:${D}\\.?(?:${D})?|\\.${D})(?:e[+-]?${D})?)\\s*$`, "i");

// Like redact.to_cell: text that a spreadsheet would take for a formula gets a mark, which relabel removes. Names that
// are not UTF-8, whose invalid bytes are lone surrogates as in Python, get a mark, too.
function cell(text) {
  return `"${marked(text).replaceAll('"', '""')}"`;
}

function marked(text) {
  if (text.startsWith("bytes:") || /[\udc80-\udcff]/u.test(text)) {
    const bytes = text.replaceAll("%", "%25").replace(/[\udc80-\udcff]/gu, (one) => `%${(one.charCodeAt(0) & 0xff).toString(16).toUpperCase()}`);
    return `bytes:${bytes}`;
  }
  const bare = text.replace(/^'+/, "");
  const isFormula = /^[\t\r]/.test(bare) || (/^[=+\-@]/.test(bare) && !bare.split(";").every((part) => NUMBER.test(part)));
  return isFormula ? `'${text}` : text;
}

function download() {
  data.sets.forEach((set, at) => {
    const rows = [...ticks].filter((tick) => data.samples[tick[0]].set === at && isLabel(tick));
    if (!rows.length) return;
    const lines = rows.map(([number, label]) => `${cell(data.samples[number].path)},${cell(written(number, label))}\n`);
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([`path,label\n${lines.join("")}`], {type: "text/csv"}));
    link.download = set.table;
    link.click();
  });
  isSaved = true;
}

// Keys.

function step(by) {
  const cards = [...find("cards").children];
  const at = cards.indexOf(document.activeElement?.closest(".card"));
  if (at + by >= cards.length) more();
  const next = find("cards").children[Math.max(0, at + by)];
  next?.focus({preventScroll: true});
  next?.scrollIntoView({block: "nearest"});
}

// The second picture lies on the first one and comes and goes, so that the eye sees what differs.
function flicker(card) {
  const isOver = card.classList.toggle("over");
  card.classList.toggle("large", isOver);
}

function keyed(event) {
  const target = event.target;
  if (event.key === "Escape") return target.closest(".card")?.focus();
  if (event.ctrlKey || event.altKey || event.metaKey || target.type === "text" || target.tagName === "SELECT") return;
  const focused = document.activeElement?.closest(".card");
  const sides = focused?.querySelectorAll(".side") ?? [];
  const count = data.sections.length;
  if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "[") show((section + count - 1) % count);
  else if (event.key === "]") show((section + 1) % count);
  else if (event.key === "d" && !find("download").disabled) download();
  else if (event.key === "f" && sides.length === 2) flicker(focused);
  else if (event.key === "e") sides[0]?.querySelector("input[type=text]")?.focus();
  else if (event.key === "1" || event.key === "2") sides[event.key - 1]?.querySelector("input")?.click();
  else return;
  event.preventDefault();
}

data.samples = data.samples.map(([set, tile, path, label, original]) => ({set, tile, path, label, original}));
for (const each of data.sections) each.cards = each.cards.map(([samples, labels, text]) => ({samples, labels, text}));
data.sections.forEach((each, at) => {
  const tab = element("button", "", `${each.title} ${each.count}`.trim());
  tab.type = "button";
  tab.setAttribute("role", "tab");
  tab.addEventListener("click", () => show(at));
  find("tabs").append(tab);
});
for (const name of new Set(data.sets.flatMap((set) => set.classes))) {
  const option = element("option", "", name);
  option.value = name;
  find("filter").append(option);
  find("classes").append(option.cloneNode(true));
}
find("filter").addEventListener("change", () => show(section));
find("download").addEventListener("click", download);
document.addEventListener("keydown", keyed);
addEventListener("beforeunload", (event) => { if (!isSaved && ticks.size) event.preventDefault(); });
if (data.sections.length) show(Math.max(0, data.sections.findIndex((each) => each.cards.length)));
