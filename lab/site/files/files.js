// Where the page is files, nobody answers but these. What was asked when they were written is stored: STORED,
// of answers.js, says what. Python in the browser answers the rest, if the files have it; it is loaded by the
// first question that needs it. A page that was opened from a folder may load nothing but scripts.
"use strict";

const LONGEST = 60;                                     // seconds of an answer
const GONE = 2;                                         // seconds of one that nobody waits for any more
const asScript = {};                                    // {address: when it is loaded}

const nameOf = query => query.slice(0, query.indexOf("?"));

function loaded(address) {
  asScript[address] ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = address;
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => {            // the next question tries again
      delete asScript[address];
      script.remove();
      reject(new Error(`${address} could not be loaded`));
    });
    document.head.append(script);
  });
  return asScript[address];
}

// The bytes of what was gzip in base64. Chromium may collect a stream that nobody holds before it has ended, so
// it's held until all of it is there. The worker below has a copy of this function.
async function unzipped(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length), held = self.unzipping ??= new Set();
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream(), whole = new Response(stream.pipeThrough(new DecompressionStream("gzip")));
  const parts = [stream, whole];
  held.add(parts);
  try {
    return await whole.arrayBuffer();
  } finally {
    held.delete(parts);
  }
}

// Whether a question is answered, as far as one knows without loading anything.
function isAnswered(query) {
  const pairs = query.slice(query.indexOf("?") + 1).split("&").map(pair => pair.split("="));
  const [names, values] = [0, 1].map(part => pairs.map(pair => pair[part]).join("&"));
  return STORED.python.includes(nameOf(query)) || Boolean(STORED.keys[nameOf(query)]?.[names]?.has(values));
}

// {"error": a line}, or the answer. tell: says what a reader waits for.
async function answerOfFiles(query, signal, tell) {
  const name = nameOf(query), find = STORED.files.includes(name) ? await answersTo(name) : () => null;
  return find(query) ?? (STORED.python.includes(name) ? askPython(query, signal, tell) : {
    error: "these pages are files, without an answer to that: `make page` starts the ones that compute" });
}

// ------------------------------------------------------------------------------------ what is stored

const finders = {};                                     // {question: what finds the answer to one}

function answersTo(name) {
  finders[name] ??= (async () => {
    await loaded(`answers/${name}.js`);
    const lines = JSON.parse(new TextDecoder().decode(await unzipped(STORED[name])));
    return query => lines[query] ?? null;
  })().catch(error => {
    delete finders[name];
    throw error;
  });
  return finders[name];
}

// ------------------------------------------------------------------------------------ what is computed

let python = null;                                      // a worker, when it has begun
let before = Promise.resolve();                         // until the answer before has been given

// One question at a time; one that is aborted while it waits is not asked, and one that runs does not run long.
async function askPython(query, signal, tell) {
  const waiting = before;
  let end;
  before = new Promise(resolve => { end = resolve; });
  try {
    await waiting;
    signal?.throwIfAborted();
    if (!python) {
      tell(`Python is loading, ${STORED.megabytes} MB, once …`);
      await startPython();
      signal?.throwIfAborted();
      tell("Python computes …");
    }
    const smaller = nameOf(query) === "best" ? "fewer GPUs, or degrees that are given," : "smaller numbers";
    return JSON.parse(await said(query, `took more than ${LONGEST} s here, and was stopped: ${smaller} would work`, signal));
  } finally {
    end();
  }
}

function endPython() {                                  // the next question starts it anew
  python?.terminate();
  python = null;
}

async function startPython() {
  await loaded("python/python.js");
  const code = new Blob([`"use strict";\n${unzipped}\n(${pythonWorker})();`], { type: "text/javascript" });
  python = new Worker(URL.createObjectURL(code));
  await said(window.PYTHON, `took more than ${LONGEST} s to start here, and was stopped`);
}

// What the worker says to that. Where it fails, takes too long, or nobody waits for it, it is ended.
function said(message, late, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`Python ${late}`)), 1000 * LONGEST);
    const once = act => ({ data, message }) => { clearTimeout(timer); act(data ?? message); };
    python.onmessage = once(resolve);
    python.onerror = once(words => reject(new Error(`Python has failed here: ${words}`)));
    signal?.addEventListener("abort", () => setTimeout(() => reject(signal.reason), 1000 * GONE));
    python.postMessage(message);
  }).catch(error => {
    endPython();
    throw error;
  });
}

// This runs in the worker. Its first message has the files of python.js; each other one is a question.
function pythonWorker() {
  let answer = null;

  async function start(files) {
    for (const name of ["pyodide.js", "pyodide.asm.js"]) {
      const script = new Blob([await unzipped(files[name])], { type: "text/javascript" });
      importScripts(URL.createObjectURL(script));
    }
    self.fetch = async address => {                     // Pyodide fetches its files from here
      const name = String(address).split("/").pop();
      const type = name.endsWith(".wasm") ? "application/wasm" : "";
      return new Response(await unzipped(files[name]), { headers: { "Content-Type": type } });
    };
    const lock = new TextDecoder().decode(await unzipped(files["lock.json"]));
    const pyodide = await self.loadPyodide({ indexURL: "python:/", lockFileContents: JSON.parse(lock) });
    pyodide.unpackArchive(await unzipped(files["course.zip"]), "zip", { extractDir: "/course" });
    pyodide.runPython("import sys; sys.path.insert(0, '/course')");
    const ours = pyodide.pyimport("lab.site.in_browser");
    ours.begin();
    answer = ours.answer;
  }

  self.onmessage = async ({ data }) => {
    try {
      if (!answer) await start(data);
      self.postMessage(typeof data === "string" ? answer(data) : "ready");
    } catch (error) {
      setTimeout(() => { throw error; });               // it is an error of the worker
    }
  };
}

for (const keys of Object.values(STORED.keys)) {
  for (const [names, values] of Object.entries(keys)) keys[names] = new Set(values);
}
