// Answers to what the tools ask. A choice of them is stored: STORED, of answers.js, says which. Python in the
// browser computes others, if the site has it; it is loaded by the first question that needs it. A page that
// was opened from a folder may load nothing but scripts.
"use strict";

const LONGEST = 60;                                     // seconds of an answer
const GONE = 2;                                         // seconds of one that nobody waits for any more
const asScript = {};                                    // {address: when it is loaded}
const hasStored = new Set(Object.values(STORED.lines).flat());

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

// Whether a question has an answer, as far as one knows without loading it.
function isAnswered(query) {
  return STORED.python.includes(nameOf(query)) || hasStored.has(query);
}

// {"error": a line}, or the answer. tell: says what a reader waits for.
async function answerTo(query, signal, tell) {
  const name = nameOf(query), stored = await storedAnswers(name);
  if (stored[query]) return stored[query];
  if (STORED.python.includes(name)) return askPython(query, signal, tell);
  return { error: `${decodeURIComponent(query.replace("?", ": ").replaceAll("&", ", "))}: that has no answer here` };
}

// ------------------------------------------------------------------------------------ what is stored

const unpacked = {};                                    // {name: the answers to its questions, as a promise}

function storedAnswers(name) {
  unpacked[name] ??= (async () => {
    await loaded(`answers/${name}.js`);
    return JSON.parse(new TextDecoder().decode(await unzipped(STORED[name])));
  })().catch(error => {
    delete unpacked[name];
    throw error;
  });
  return unpacked[name];
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
    answer = pyodide.pyimport("lab.site.in_browser").answer;
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
