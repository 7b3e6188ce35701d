// What seen.broken asks a page. Each function returns lines about what it found; none changes the page.
(() => {
  const SHAPES = "rect, circle, ellipse, polygon, path";
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const kept = (make, known = new Map()) => key => known.has(key) ? known.get(key) : known.set(key, make(key)).get(key);
  const where = element => `#${element.closest("[id]")?.id} ${element.localName}.${element.classList}`;

  const rgba = kept(color => {                          // [red, green, blue, opacity] from 0 to 1
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map(value => value / 255);
  });
  const faded = (color, by) => [...color.slice(0, 3), color[3] * by];
  const over = (above, below) => [0, 1, 2].map(i => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
  const styleOf = kept(element => getComputedStyle(element));
  const opacityOf = kept(element => styleOf(element).opacity * (element.parentElement ? opacityOf(element.parentElement) : 1));
  const paper = kept(element => {                       // the color behind what is in it
    const { backgroundColor } = styleOf(element), below = element.parentElement ? paper(element.parentElement) : rgba("Canvas");
    return over(faded(rgba(backgroundColor), opacityOf(element)), below);
  });

  function contrast(ink, below) {
    const light = color => color.slice(0, 3).map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
      .reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * value, 0.05);
    const [dark, bright] = [light(over(ink, below)), light(below)].sort((a, b) => a - b);
    return bright / dark;
  }

  const isShown = kept(element => {
    const box = element.getBoundingClientRect(), { overflow, display } = styleOf(element);
    const isNothing = (box.width <= 1 || box.height <= 1) && overflow !== "visible" && display !== "inline";
    return !isNothing && element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
      box.right + scrollX > 0 && box.bottom + scrollY > 0 && (!element.parentElement || isShown(element.parentElement));
  });

  // ------------------------------------------------------------------------------------- texts of charts

  function fillOf(shape) {
    const { fill, fillOpacity } = styleOf(shape);
    return /^(none|url)/.test(fill) ? [0, 0, 0, 0] : faded(rgba(fill), fillOpacity * opacityOf(shape));
  }

  const isIn = (shape, { x, y }) => shape.isPointInFill(new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse()));
  const hasHalo = text => styleOf(text).paintOrder.startsWith("stroke") && parseFloat(styleOf(text).strokeWidth) >= 3;

  function corners(text) {                              // of its letters on the screen
    const [first, last] = [0, text.getNumberOfChars() - 1].map(at => text.getExtentOfChar(at));
    const [top, bottom] = [0.25, 0.78].map(down => first.y + down * first.height), right = last.x + last.width;
    return [[first.x, top], [right, top], [right, bottom], [first.x, bottom]]
      .map(([x, y]) => new DOMPoint(x, y).matrixTransform(text.getScreenCTM()));
  }

  const middleOf = points => ({ x: (points[0].x + points[2].x) / 2, y: (points[0].y + points[2].y) / 2 });

  function behind(text) {                               // the color of what its chart draws below it
    const svg = text.ownerSVGElement, middle = middleOf(corners(text));
    if (hasHalo(text)) return rgba(styleOf(text).stroke);
    return [...svg.querySelectorAll(SHAPES)].filter(shape => !shape.closest("defs, clipPath") && isIn(shape, middle) &&
      shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)
      .reduce((below, shape) => over(fillOf(shape), below), paper(svg.parentElement));
  }

  function overlaps() {                                 // over another text, or cut off
    const found = [];
    for (const svg of [...document.querySelectorAll("svg")].filter(isShown)) {
      const edge = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")]
        .filter(text => text.textContent.trim() && isShown(text)).map(text => {
          const [{ x: left, y: top }, , { x: right, y: bottom }] = corners(text);
          return { left, top, right, bottom, said: text.textContent.slice(0, 40) };
        });
      texts.forEach((one, at) => {
        const isCut = one.left < edge.left - 1 || one.right > edge.right + 1 || one.top < edge.top - 1 || one.bottom > edge.bottom + 1;
        if (isCut && styleOf(svg).overflow !== "visible") found.push(`cut off: ${one.said}`);
        for (const other of texts.slice(at + 1)) {
          const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
          const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
          if (wide > 1 && high > 1) found.push(`over each other: ${one.said}, ${other.said}`);
        }
      });
    }
    return found;
  }

  // ---------------------------------------------------------------------------------- contrast

  function pale() {                                     // below WCAG's 4.5, or 3 if it is large
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), seen = new Map(), found = [];
    while (walk.nextNode()) {
      const element = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      if (text && !element.closest("script, style, option, title, desc, [inert], :disabled")) seen.set(element, text);
    }
    for (const field of document.querySelectorAll("select, input:not([type=range], [type=checkbox], [type=radio])")) {
      if (field.value && !field.disabled) seen.set(field, field.value);
    }
    const alike = {};
    for (const [element, text] of seen) {
      const isChart = element instanceof SVGElement, style = styleOf(element), size = parseFloat(style.fontSize);
      const key = `${element.classList} ${element.getAttribute("fill")}`;
      if (isChart) alike[key] = (alike[key] ?? 0) + 1;  // a schedule has thousands
      if (!isShown(element) || alike[key] > 100) continue;
      const ink = isChart ? fillOf(element) : faded(rgba(style.color), opacityOf(element));
      const least = size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5;
      const ratio = contrast(ink, isChart ? behind(element) : paper(element));
      if (ink[3] && ratio < least - 0.005) found.push(`contrast ${ratio.toFixed(1)}: ${text.slice(0, 40)}, ${where(element)}`);
    }
    return found;
  }

  async function shifts() {                             // that no click and no key caused
    const seen = [], observer = new PerformanceObserver(list => seen.push(...list.getEntries()));
    observer.observe({ type: "layout-shift", buffered: true });
    for (let i = 0; i < 3; i++) await new Promise(resolve => { requestAnimationFrame(() => setTimeout(resolve)); });
    const sum = seen.filter(one => !one.hadRecentInput).reduce((sum, one) => sum + one.value, 0);
    return sum > 0.1 ? [`it shifts by ${sum.toFixed(2)}`] : [];
  }

  const moving = () => document.getAnimations().filter(one => one.playState === "running")
    .map(one => `it moves: ${where(one.effect.target)}`);

  return { pale, overlaps, shifts, moving };
})()
