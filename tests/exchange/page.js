// Runs the programs in an exported page without a browser: node page.js FILE.html CALLS.json prints
// the results of a list of calls [name, ...arguments], in JSON.
"use strict";

const fs = require("node:fs");
const vm = require("node:vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...page.matchAll(/<script([^>]*)>(.*?)<\/script>/gs)];
const data = new Map();
for (const [, attributes, content] of scripts) {
  const id = attributes.match(/id="([^"]*)"/);
  if (id) data.set(id[1], content);
}
globalThis.window = globalThis;
globalThis.document = { getElementById: (id) => ({ textContent: data.get(id) }) };
const programs = scripts.filter(([, attributes]) => !attributes).map(([, , content]) => content);
// All but that of the page itself.
vm.runInThisContext(programs.slice(0, -1).join("\n") + ";globalThis.smallmindModel=smallmindModel");
const { program } = globalThis.smallmindClient;

const CALLS = {
  encode: (text, special) => program.tokenizer.encode(text, special),
  begun: (text) => program.prompt(text),
  decode: (ids) => program.tokenizer.decode(ids),
  pieces(ids) {
    const stream = program.tokenizer.stream();
    return [...ids.map((id) => stream.add(id)), stream.end()];
  },
  // The first and the last of the characters in a row that make one word with a letter, a number
  // or a sign before them.
  classes() {
    const found = { letters: [], numbers: [], others: [] };
    for (let code = 0; code < 0x110000; code++) {
      if (code === 0xd800) code = 0xe000;
      const character = String.fromCodePoint(code);
      for (const [name, before] of [["letters", "a"], ["numbers", "1"], ["others", "="]]) {
        const words = (before + character).match(program.tokenizer.pattern);
        const last = found[name].at(-1);
        if (words.length > 1) continue;
        if (last && last[1] === code - 1) last[1] = code;
        else found[name].push([code, code]);
      }
    }
    return found;
  },
  prompt: (messages) => program.template.prompt(program.tokenizer, messages),
  async write(prompt, settings) {
    const ids = typeof prompt === "string" ? program.prompt(prompt) : prompt;
    const events = [];
    for await (const event of program.write(ids, settings)) events.push(event);
    return {
      text: events.map(({ piece }) => piece).join(""),
      ids: events.slice(0, -1).map(({ id }) => id),
      ended: events[events.length - 1].ended,
      events,
    };
  },
  // The logits after each token, all in one cache.
  logits(ids) {
    const cache = program.model.cache();
    return ids.map((id) => {
      const steps = program.model.decode(cache, [id]);
      for (;;) {
        const { done, value } = steps.next();
        if (done) return Array.from(value);
      }
    });
  },
  inspect: (ids, top) => program.inspect(ids, top),
  attention: (...given) => program.attention(...given),
  choose(logits, settings, uniform, counts) {
    return smallmindModel.choose(Float32Array.from(logits), settings, uniform, new Map(counts));
  },
  hash: (...words) => String(smallmindModel.hash64(...words)),
  weights: (name) => Array.from(program.model.tensors.get(name)),
  async seconds(prompt, tokens) {
    const ids = program.tokenizer.encode(prompt);
    const begin = performance.now();
    let count = 0;
    const settings = { max_tokens: tokens, temperature: 0 };
    for await (const { id } of program.write(ids, settings)) count += id !== undefined;
    return { seconds: (performance.now() - begin) / 1000, tokens: count };
  },
};

async function main() {
  const results = [];
  for (const [name, ...given] of JSON.parse(fs.readFileSync(process.argv[3], "utf8"))) {
    try {
      results.push(await CALLS[name](...given));
    } catch (error) {
      results.push({ error: error.message });
    }
  }
  process.stdout.write(JSON.stringify(results));
}

main();
