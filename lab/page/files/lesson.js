// What a symbol means, where one points at it or taps it. It is read from the list above the lesson,
// which is there for the keyboard and without a script.
"use strict";

const MEANING = make("div", { id: "meaning", role: "tooltip", hidden: "" });

function showMeaning(symbol) {
  const entry = $(`[data-entry="${CSS.escape(symbol.getAttribute("data-is"))}"] dd`);
  if (!entry) return;
  MEANING.textContent = entry.textContent;
  MEANING.hidden = false;
  const place = symbol.getBoundingClientRect(), box = MEANING.getBoundingClientRect();
  const left = Math.min(place.left, document.documentElement.clientWidth - box.width - 8);
  const below = place.bottom + box.height + 6 < innerHeight;
  MEANING.style.left = `${Math.max(8, left) + scrollX}px`;
  MEANING.style.top = `${(below ? place.bottom + 4 : place.top - box.height - 4) + scrollY}px`;
}

function pointAt(event) {
  const symbol = event.target.closest("[data-is]");
  if (symbol) showMeaning(symbol);
  else if (!MEANING.contains(event.target)) MEANING.hidden = true;
}

document.body.append(MEANING);
document.addEventListener("pointerover", pointAt);
document.addEventListener("click", pointAt);
document.addEventListener("keydown", event => { if (event.key === "Escape") MEANING.hidden = true; });

KEYS.s = () => {                                        // the list of all symbols of the page
  const list = $(".symbols");
  if (!list) return;
  list.open = !list.open;
  $("summary", list).focus();
};
