// What rules.py asks a page: an object of functions. It draws nothing and changes nothing.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colors = new Map();

  // Any color of CSS, through a filter, as [red, green, blue, opacity], each 0 to 1.
  function rgba(color, filter = "none") {
    const key = `${color} ${filter}`;
    if (!colors.has(key)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.filter = filter;
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      colors.set(key, [...canvas.getImageData(0, 0, 1, 1).data].map(value => value / 255));
    }
    return colors.get(key);
  }

  function over(above, below) {
    const opacity = above[3] + below[3] * (1 - above[3]);
    if (!opacity) return [0, 0, 0, 0];
    const mixed = [0, 1, 2].map(i => (above[i] * above[3] + below[i] * below[3] * (1 - above[3])) / opacity);
    return [...mixed, opacity];
  }

  const faded = ([red, green, blue, opacity], by) => [red, green, blue, opacity * by];

  function luminance(color) {
    const [red, green, blue] = color.map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }

  function ratio(one, other) {
    const [dark, bright] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  }

  const hex = color => "#" + color.slice(0, 3)
    .map(value => Math.round(255 * value).toString(16).padStart(2, "0")).join("");

  // ------------------------------------------------------------------------------------ what is shown

  function selector(element) {
    const one = node => node.localName + (node.id ? `#${node.id}` : "") +
      [...node.classList].map(name => `.${name}`).join("");
    const path = [];
    for (let node = element; node && node !== document.body && path.length < 4; node = node.parentElement) {
      path.unshift(one(node));
      if (node.id) break;
    }
    return path.join(" > ");
  }

  function isShown(element) {
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) return false;
    for (let node = element; node; node = node.parentElement) {
      const box = node.getBoundingClientRect(), style = getComputedStyle(node);
      const isNothing = box.width <= 1 || box.height <= 1;
      if (isNothing && style.overflow !== "visible" && style.display !== "inline") return false;
    }
    const box = element.getBoundingClientRect();
    return box.right + scrollX > 0 && box.bottom + scrollY > 0;
  }

  // A control that answers to nobody may be pale, and so may what an old answer left.
  const isInactive = element => Boolean(element.closest("[inert], [aria-disabled=true]")) ||
    element.matches(":disabled, :disabled *");

  // ---------------------------------------------------------------------------- what lies at a point

  const styles = new Map(), boxes = new Map();
  const kept = (map, make) => element => {
    if (!map.has(element)) map.set(element, make(element));
    return map.get(element);
  };
  const ASKED = ["opacity", "filter", "display", "visibility", "backgroundColor", "clipPath", "stopColor", "fill",
                 "fillOpacity", "stroke", "strokeOpacity", "strokeWidth", "paintOrder", "webkitTextFillColor",
                 "color", "fontSize", "fontWeight", "overflow", "overflowX", "overflowY"];
  const styleOf = kept(styles, element => {             // a copy: each look at a style that is alive takes long
    const style = getComputedStyle(element);
    return Object.fromEntries(ASKED.map(name => [name, style[name]]));
  });
  const boxOf = kept(boxes, element => element.getBoundingClientRect());
  const opacityOf = element => Number(styleOf(element).opacity);
  const isText = element => ["text", "tspan"].includes(element.localName);

  function through(element, color) {                    // an element's opacity and filter, as a whole
    const { filter } = styleOf(element);
    const seen = faded(color, opacityOf(element));
    if (filter === "none" || !seen[3]) return seen;
    return rgba(`rgb(${seen.slice(0, 3).map(value => 255 * value).join(" ")} / ${seen[3]})`, filter);
  }

  // A color, or what a pattern or a gradient has on top.
  function paintOf(element, name) {
    const style = styleOf(element), opacity = Number(style[`${name}Opacity`]);
    const found = style[name].match(/^url\("?#(.+?)"?\)/);
    if (!found) return style[name] === "none" ? [0, 0, 0, 0] : faded(rgba(style[name]), opacity);
    return [...document.getElementById(found[1])?.children ?? []].reduce((below, child) => over(
      rgba(child.localName === "stop" ? styleOf(child).stopColor : styleOf(child).fill), below), [0, 0, 0, 0]);
  }

  function isIn(shape, point, what = "Fill") {
    const matrix = shape.getScreenCTM?.();
    if (!matrix || !shape.isPointInFill) return false;
    return shape[`isPointIn${what}`](new DOMPoint(point.x, point.y).matrixTransform(matrix.inverse()));
  }

  function isClipped(element, point) {
    const found = styleOf(element).clipPath.match(/^url\("?#(.+?)"?\)/);
    const clip = found && document.getElementById(found[1]);
    if (!clip || clip.clipPathUnits.baseVal === 2) return false;
    const matrix = element.getScreenCTM().inverse(), at = new DOMPoint(point.x, point.y).matrixTransform(matrix);
    return ![...clip.children].some(shape => shape.isPointInFill?.(at));
  }

  // The children that may have something at a point of the screen, the lowest first. A chart has thousands:
  // they are kept by squares of the screen.
  const SQUARE = 24, EDGE = 4;                          // px; a line is wider than its box
  const squares = kept(new Map(), element => {
    const found = new Map(), at = value => Math.floor(value / SQUARE);
    for (const child of element.children) {
      const box = boxOf(child);
      for (let x = at(box.left - EDGE); x <= at(box.right + EDGE); x++) {
        for (let y = at(box.top - EDGE); y <= at(box.bottom + EDGE); y++) {
          const key = `${x} ${y}`;
          if (!found.has(key)) found.set(key, []);
          found.get(key).push(child);
        }
      }
    }
    return found;
  });
  const near = (element, { x, y }) => squares(element).get(`${Math.floor(x / SQUARE)} ${Math.floor(y / SQUARE)}`) || [];

  // The color of an SVG element at a point of the screen; ink: the color that the text has there.
  function painted(element, point, text, ink) {
    const style = styleOf(element);
    if (element === text) return through(element, ink || [0, 0, 0, 0]);
    if (style.display === "none" || isText(element) && !element.contains(text)) return [0, 0, 0, 0];
    if (isClipped(element, point)) return [0, 0, 0, 0];
    let color = element.localName === "svg" ? rgba(style.backgroundColor) : [0, 0, 0, 0];
    if (["defs", "clipPath", "mask", "pattern", "title", "desc", "marker"].includes(element.localName)) return color;
    if (element.isPointInFill && style.visibility !== "hidden") {
      if (isIn(element, point)) color = over(paintOf(element, "fill"), color);
      if (parseFloat(style.strokeWidth) >= 5 && style.stroke !== "none" && isIn(element, point, "Stroke")) {
        color = over(paintOf(element, "stroke"), color);
      }
    }
    for (const child of near(element, point)) color = over(painted(child, point, text, ink), color);
    return through(element, color);
  }

  // The color of the screen where a text is, with its ink or without; path: from the root to its element.
  function layered(path, draw) {
    const [element, ...rest] = path;
    if (element instanceof SVGElement) return draw(element);
    const inside = rest.length ? layered(rest, draw) : draw(null);
    return through(element, over(inside, rgba(styleOf(element).backgroundColor)));
  }

  function onScreen(element, ink, point = null) {
    const path = [];
    for (let node = element; node; node = node.parentElement) {
      path.unshift(node);
      if (node instanceof SVGElement && !(node.parentElement instanceof SVGElement)) path.splice(1);
    }
    const seen = layered(path, svg => svg ? painted(svg, point, element, ink) : ink || [0, 0, 0, 0]);
    return over(seen, rgba("Canvas"));
  }

  // ------------------------------------------------------------------------------------------- texts

  function* texts() {                                   // [element, text, its color, or null: the element's]
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const seen = new Set();
    while (walk.nextNode()) {
      const element = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      if (!text || seen.has(element) || element.closest("script, style, option, title, desc, noscript, defs")) continue;
      seen.add(element);
      yield [element, text, null];
    }
    for (const element of document.body.querySelectorAll("*")) {
      if (element.matches("select, textarea, input:not([type=range], [type=checkbox], [type=radio], [type=color])")) {
        const { value, placeholder } = element;
        if (value) yield [element, value, null];
        else if (placeholder) yield [element, placeholder, getComputedStyle(element, "::placeholder").color];
      }
      for (const place of ["::before", "::after"]) {
        const style = getComputedStyle(element, place), said = style.content.match(/^"(.*\S.*)"/);
        if (said && style.display !== "none") yield [element, said[1], style.color];
      }
    }
  }

  // Points of the screen within the letters of an SVG text: of the first, of one in the middle, of the last.
  function pointsOf(element) {
    const count = element.getNumberOfChars(), matrix = element.getScreenCTM();
    return [...new Set([0, count >> 1, count - 1])].flatMap(at => {
      const box = element.getExtentOfChar(at);
      return [0.35, 0.5, 0.7].map(down => new DOMPoint(box.x + box.width / 2, box.y + down * box.height)
        .matrixTransform(matrix));
    });
  }

  function inkOf(element) {
    const style = styleOf(element);
    return element instanceof SVGElement ? paintOf(element, "fill")
      : rgba(style.webkitTextFillColor || style.color);
  }

  // A line around the letters, in the color of the paper, is what they stand on.
  function halo(element) {
    const style = styleOf(element);
    return element instanceof SVGElement && style.paintOrder.startsWith("stroke") && style.stroke !== "none" &&
      parseFloat(style.strokeWidth) >= 3 ? paintOf(element, "stroke") : null;
  }

  function sizeOf(element) {
    const matrix = element instanceof SVGElement && element.getScreenCTM();
    const scale = matrix ? Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c)) : 1;
    return scale * parseFloat(styleOf(element).fontSize);
  }

  // Of a chart's texts that are alike, MANY, at even distances: a schedule has thousands.
  const MANY = 300;

  function someOf(all) {
    const alike = new Map(), seen = new Map(), times = (map, key) => map.set(key, (map.get(key) || 0) + 1).get(key);
    const look = element => ["class", "font-size", "fill"].map(name => element.getAttribute(name)).join();
    const isOne = ([element]) => element instanceof SVGElement;
    for (const one of all) if (isOne(one)) times(alike, look(one[0]));
    return all.filter(one => {
      if (!isOne(one)) return true;
      const key = look(one[0]);
      return times(seen, key) % Math.ceil(alike.get(key) / MANY) === 0;
    });
  }

  function contrasts() {
    const found = new Map(), cells = new Map();
    for (const [element, text, color] of someOf([...texts()])) {
      if (!isShown(element) || isInactive(element)) continue;
      const inSVG = element instanceof SVGElement, ink = color ? rgba(color) : inkOf(element);
      if (!ink[3]) continue;
      let seen = [];
      if (inSVG) {
        seen = pointsOf(element).map(point => [onScreen(element, ink, point), onScreen(element, halo(element), point)]);
      } else {
        const key = `${[...styleKey(element)].join("|")} ${ink}`;
        if (!cells.has(key)) cells.set(key, [onScreen(element, ink), onScreen(element, null)]);
        seen = [cells.get(key)];
      }
      const [value, pair] = seen.map(pair => [ratio(...pair), pair]).reduce((a, b) => b[0] < a[0] ? b : a);
      const size = sizeOf(element), isLarge = size >= 24 || size >= 18.66 && Number(styleOf(element).fontWeight) >= 700;
      const key = `${selector(element)} ${value.toFixed(2)} ${isLarge}`;
      if (found.has(key)) {
        found.get(key).times += 1;
        continue;
      }
      found.set(key, { ratio: value, least: isLarge ? 3 : 4.5, text: text.slice(0, 60), where: selector(element),
                       colors: pair.map(hex).join(" on "), pixels: size, times: 1 });
    }
    return [...found.values()].sort((a, b) => a.ratio / a.least - b.ratio / b.least);
  }

  function* styleKey(element) {                         // what decides how HTML looks: of all ancestors
    for (let node = element; node; node = node.parentElement) {
      const style = styleOf(node);
      if (style.opacity !== "1" || style.filter !== "none") yield `${style.opacity} ${style.filter}`;
      yield style.backgroundColor;
    }
  }

  // --------------------------------------------------------------------------- texts and their shapes

  const SHAPES = "rect, circle, ellipse, polygon, path";

  function corners(element) {                           // of the letters, without what is above and below them
    const matrix = element.getScreenCTM();
    const [first, last] = [0, element.getNumberOfChars() - 1].map(at => element.getExtentOfChar(at));
    const [top, bottom] = [0.25, 0.78].map(down => first.y + down * first.height);
    const [left, right] = [Math.min(first.x, last.x), Math.max(first.x + first.width, last.x + last.width)];
    return [[left, top], [right, top], [right, bottom], [left, bottom]]
      .map(([x, y]) => new DOMPoint(x, y).matrixTransform(matrix));
  }

  const middleOf = points => ({ x: points.reduce((sum, one) => sum + one.x, 0) / points.length,
                                y: points.reduce((sum, one) => sum + one.y, 0) / points.length });

  function frame(points) {
    const [xs, ys] = [points.map(one => one.x), points.map(one => one.y)];
    return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
  }

  const isWithin = ({ x, y }, { left, right, top, bottom }) => x >= left && x <= right && y >= top && y <= bottom;

  // The shape of its group, where both are alone there; or else the topmost below its middle.
  function ownShape(text, middle) {
    const group = text.parentElement, beside = [...group.children];
    const shapes = group.localName === "g" ? beside.filter(one => one.matches(SHAPES)) : [];
    if (shapes.length === 1 && beside.filter(isText).length === 1) return shapes[0];
    return [...text.ownerSVGElement.querySelectorAll(SHAPES)].findLast(shape =>
      shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING && !shape.closest("defs") &&
      isWithin(middle, boxOf(shape)) && paintOf(shape, "fill")[3] > 0.5 && isIn(shape, middle));
  }

  function overlaps() {
    const found = [];
    for (const svg of document.querySelectorAll("svg")) {
      if (!isShown(svg)) continue;
      const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim() && isShown(text) &&
        text.getNumberOfChars() && Number(styleOf(text).fillOpacity) > 0);
      const framed = texts.map(text => [text, corners(text)]).map(([text, points]) => [text, frame(points), points]);
      const edge = svg.getBoundingClientRect(), tell = (what, text) => found.push({
        what, text: text.textContent.slice(0, 40), where: selector(text) });
      framed.forEach(([text, box, points], at) => {
        if (styleOf(svg).overflow !== "visible" && (box.left < edge.left - 1 || box.right > edge.right + 1 ||
            box.top < edge.top - 1 || box.bottom > edge.bottom + 1)) tell("cut off at the chart's edge", text);
        const middle = middleOf(points), shape = !halo(text) && ownShape(text, middle);
        const isInside = shape && points.every(point => isIn(shape, nearer(point, middle)));
        if (shape && !isInside) tell(`outside of its ${shape.localName}`, text);
        for (const [other, its] of framed.slice(at + 1)) {
          const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
          const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
          if (wide > 1 && high > 1) tell(`over the text ${other.textContent.slice(0, 40)}`, text);
        }
      });
    }
    return found;
  }

  // A pixel nearer to the middle: a letter ends before its box does.
  const nearer = (point, to) => ({ x: point.x - Math.sign(point.x - to.x), y: point.y - Math.sign(point.y - to.y) });

  // ------------------------------------------------------------------------------------ names and keys

  const CONTROLS = "a[href], button, input, select, textarea, summary, dialog, [role=button]";

  function nameOf(element) {
    const said = [element.getAttribute("aria-label"),
                  ...(element.getAttribute("aria-labelledby") || "").split(/\s+/).filter(Boolean)
                    .map(id => document.getElementById(id)?.textContent),
                  ...[...element.labels || []].map(label => spoken(label, element)),
                  element.matches("input, select, textarea, dialog") ? "" : spoken(element),
                  element.getAttribute("alt"), element.getAttribute("title"),
                  element.matches("[type=submit], [type=button]") ? element.value : "",
                  element.matches("svg") ? element.querySelector(":scope > title")?.textContent : ""];
    return said.map(one => one?.trim()).find(Boolean) || "";
  }

  function spoken(element, without = null) {            // its text, and the names of what is in it
    return [...element.childNodes].map(node => {
      if (node.nodeType === Node.TEXT_NODE) return node.data;
      const isSilent = node.nodeType !== Node.ELEMENT_NODE || node.matches("[aria-hidden=true], output");
      if (isSilent || node === without) return "";
      return node.getAttribute("aria-label") || node.getAttribute("alt") || spoken(node, without);
    }).join("");
  }

  function unnamed() {
    const found = [], tell = (element, what) => found.push({ what, name: nameOf(element), where: selector(element) });
    for (const element of document.querySelectorAll(CONTROLS)) {
      const isHidden = !isShown(element) || element.closest("[aria-hidden=true]");
      if (!isHidden && !nameOf(element)) tell(element, "it has no name");
    }
    for (const element of document.querySelectorAll("img, svg, [role=img]")) {
      const isPart = element.closest("[aria-hidden=true]") || element.parentElement.closest("svg, [role=img]");
      if (isPart || !isShown(element) || element.getAttribute("alt") === "") continue;
      const name = nameOf(element), isImage = element.localName === "img" || element.getAttribute("role") === "img";
      if (!isImage) tell(element, "it has no role: img, or aria-hidden");
      else if (!name) tell(element, "it has no name");
      else if (element.matches("svg") && !/\d/.test(name)) tell(element, "its name says no number that it shows");
    }
    return found;
  }

  const STOPS = "a[href], button, input, select, textarea, summary, iframe, [tabindex], [contenteditable]";

  function tabStops() {
    const stops = [...document.querySelectorAll(STOPS)].filter(element => element.tabIndex >= 0 && !element.disabled &&
      element.checkVisibility({ visibilityProperty: true }) && !element.closest("[inert]") &&
      !(element.type === "radio" && !element.checked && document.querySelector(`[name="${element.name}"]:checked`)));
    const scrolls = [...document.querySelectorAll("body *")].filter(element => {
      const { overflowX, overflowY } = styleOf(element);
      const isLarger = element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight;
      return /auto|scroll/.test(overflowX + overflowY) && isLarger && element.checkVisibility() &&
        !element.hasAttribute("tabindex") && !element.querySelector(STOPS);
    });
    return [...stops, ...scrolls].map(selector);
  }

  // ------------------------------------------------------------------------------------------ loading

  function shifts() {
    const seen = [];
    const where = node => node && selector(node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement);
    const observer = new PerformanceObserver(list => seen.push(...list.getEntries()));
    observer.observe({ type: "layout-shift", buffered: true });
    return new Promise(resolve => {
      setTimeout(() => resolve(seen.map(({ value, hadRecentInput, sources }) => ({
        value, typed: hadRecentInput, where: sources.map(source => where(source.node)).filter(Boolean) }))), 30);
    });
  }

  function weight() {
    return [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
      .map(entry => [entry.name, entry.encodedBodySize]);
  }

  function moving() {
    return document.getAnimations().filter(one => one.playState === "running")
      .map(one => selector(one.effect.target) + (one.effect.pseudoElement || ""));
  }

  return { contrasts, overlaps, unnamed, tabStops, shifts, weight, moving };
})()
