
"use strict";

// The page of smallmind: talk with a model, see what it chose from, watch runs. One file, no
// framework. Whatever comes from a model or a file is shown as text, never as HTML.

// --- client ---
//
// All that the page asks goes through an object with
//   features                      {watch, attention}: the parts that exist
//   state()                       -> {models, runs, limits}
//   complete(asked, tell, signal) asked: {model, kind: "chat" | "completion", messages | prompt,
//                                 settings, n, top, prefix_tokens}. Calls tell({index, text,
//                                 tokens: [{id, text, logprob, entropy, top}], finish_reason}) for
//                                 every piece; top: [[id, text, logprob], ...]
//   inspect({model, text | ids | messages, top}) -> {tokens, loss}
//   attention({model, ids, layer, head}) -> {weights}: a row per token, of itself and those before
//   runs(), run(name), report(name)  -> {runs}; a run and its chart; the address of its report
// An exported page brings one of its own as window.smallmindClient; else a server answers.

const serverClient = () => {
  let token = "";
  try {
    token = sessionStorage.getItem("smallmind token") ?? "";
  } catch {
    // In a frame on a page of another site, such as a notebook, there may be no storage.
  }

  async function ask(path, body, signal) {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const options = { headers, signal };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw Object.assign(new Error("The server is not responding."), { gone: true });
    }
    if (answer.ok) return answer;
    const found = await answer.json().catch(() => null);
    const message = found?.error?.message ?? `The server answered ${answer.status}.`;
    throw Object.assign(new Error(message), { status: answer.status });
  }
  const json = async (path, body) => (await ask(path, body)).json();

  // The events of a stream, each a JSON object.
  async function* eventsOf(answer) {
    const decoder = new TextDecoder();
    let waiting = "";
    const reader = answer.body.getReader();
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw Object.assign(new Error("The server disconnected in the middle of an answer."), { gone: true });
      }
      if (part.done) break;
      waiting += decoder.decode(part.value, { stream: true });
      const events = waiting.split("\n\n");
      waiting = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
    throw Object.assign(new Error("The server disconnected in the middle of an answer."), { gone: true });
  }

  // The tokens of a piece, in the form that this page has.
  function tokensOf(logprobs) {
    if (!logprobs) return [];
    if (logprobs.content) {
      return logprobs.content.map(({ id, token, logprob, entropy, top_logprobs }) => ({
        id, text: token, logprob, entropy,
        top: top_logprobs.map((other) => [other.id, other.token, other.logprob]),
      }));
    }
    return logprobs.tokens.map((text, i) => ({
      id: logprobs.ids[i], text, logprob: logprobs.token_logprobs[i],
      entropy: logprobs.entropies[i],
      top: logprobs.top_ids[i].map(
        (id, j) => [id, logprobs.top_texts[i][j], logprobs.top_values[i][j]]),
    }));
  }

  return {
    features: { watch: true, attention: true },
    async useToken(given) {
      token = given;
      await ask("/api/session", {}); // a cookie, for the report in its frame
      try { sessionStorage.setItem("smallmind token", given); } catch { /* for this visit only */ }
    },
    state: () => json("/api/state"),
    inspect: (asked) => json("/api/inspect", asked),
    attention: (asked) => json("/api/attention", asked),
    runs: () => json("/api/runs"),
    run: (name) => json(`/api/runs/${encodeURIComponent(name)}`),
    report: (name) => `/api/runs/${encodeURIComponent(name)}/report`,
    async complete({ kind, settings: { form = "", ...settings }, top, ...asked }, tell, signal) {
      const isChat = kind === "chat";
      const probabilities = isChat ? { logprobs: true, top_logprobs: top } : { logprobs: top };
      const body = { ...asked, ...settings, ...formOf(form.trim()), ...probabilities, stream: true };
      const path = isChat ? "/v1/chat/completions" : "/v1/completions";
      for await (const event of eventsOf(await ask(path, body, signal))) {
        if (event.error) throw new Error(event.error.message);
        for (const { index, delta, text, logprobs, finish_reason } of event.choices) {
          const piece = isChat ? (delta.content ?? "") : text;
          const thought = delta?.reasoning_content ?? "";
          tell({ index, text: piece, thought, tokens: tokensOf(logprobs), finish_reason });
        }
      }
    },
  };
};

// The fields of a request for answers in a form: "json", a schema, or an expression.
function formOf(text) {
  if (!text) return {};
  if (/^json$/i.test(text)) return { response_format: { type: "json_object" } };
  if (text.startsWith("{")) return { json_schema: text };
  return { regex: text.replace(/^\/(.*)\/$/s, "$1") };
}

const client = window.smallmindClient ?? serverClient();

// --- small things ---

const $ = (id) => document.getElementById(id);
const TOP = 10; // alternatives that are asked for

// A new element with properties, and children that are elements or texts.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function svg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return `${share >= 9.95 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : "<0.1"}%`;
};
const duration = (seconds) => {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
};
const whole = (n) => n.toLocaleString("en");

// --- what is remembered over a refresh ---

const KEY = "smallmind";
const memory = {
  turns: [], // {role: "user", text} or {role: "assistant", answers: [answer], kept}
  model: "", tab: "talk", settings: {}, draft: "",
};

function remember() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(memory));
  } catch {
    // Too long a conversation, or no storage: it lasts as long as the page.
  }
}

function recall() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
    memory.turns = checkedTurns(found.turns ?? []);
    for (const name of ["model", "tab", "draft"]) {
      if (typeof found[name] === "string") memory[name] = found[name];
    }
    memory.settings = typeof found.settings === "object" ? (found.settings ?? {}) : {};
  } catch {
    memory.turns = [];
  }
}

let rememberLater = 0;
function changed() {
  clearTimeout(rememberLater);
  rememberLater = setTimeout(remember, 200);
}
addEventListener("pagehide", remember);

// --- state: models, and whether the server is there ---

let models = [];
const known = () => models.find((model) => model.id === memory.model);

function say(text) {
  $("banner").textContent = text;
  $("banner").hidden = !text;
}

let nextState = 0;
async function refreshState() {
  clearTimeout(nextState);
  try {
    const state = await client.state();
    say("");
    $("token-form").hidden = true;
    showModels(state.models);
  } catch (error) {
    if (error.status === 401) {
      $("token-form").hidden = false;
    } else {
      say(error.gone ? `${error.message} Trying again …` : error.message);
    }
  }
  clearTimeout(nextState);
  nextState = setTimeout(refreshState, $("banner").hidden ? 10_000 : 1_500);
}

// Says that the server has gone, and asks soon whether it is back.
function miss(error) {
  say(`${error.message} Trying again …`);
  clearTimeout(nextState);
  nextState = setTimeout(refreshState, 1_500);
}

let listed = ""; // the models as they are shown: an open list is left alone
function showModels(found) {
  const now = JSON.stringify([found, memory.model]);
  if (now === listed) return;
  models = found;
  if (!known()) memory.model = models[0]?.id ?? "";
  const options = models.map((model) => {
    const step = model.step === null || model.step === undefined ? "" : ` (step ${whole(model.step)})`;
    return make("option", { value: model.id, selected: model.id === memory.model }, model.name + step);
  });
  $("model").replaceChildren(...options);
  listed = JSON.stringify([found, memory.model]);
  showAbout();
  if (!stopping && !$("turns").querySelector("textarea")) showTurns();
}

function showAbout() {
  const model = known();
  $("send").disabled = !model;
  if (!model) {
    $("about").textContent = "No models yet. `smallmind train` makes one; it will appear here.";
    return;
  }
  if (model.error) {
    $("about").textContent = model.error;
    return;
  }
  const size = `${whole(model.parameters)} parameters, ${whole(model.block_size)}-token context`;
  const how = model.kind === "chat" ? "conversation" : "text completion";
  $("about").textContent = `${model.name}: ${size}, ${how}`;
  $("input").placeholder = model.kind === "chat" ? "Write a message" : "Start a text for the model to continue";
  for (const [id, count] of [["layer", model.layers], ["head", model.heads]]) {
    if ($(id).options.length !== count) {
      $(id).replaceChildren(...Array.from({ length: count }, (_, i) => make("option", { value: i }, String(i + 1))));
    }
  }
}

$("model").addEventListener("change", () => {
  memory.model = $("model").value;
  changed();
  showAbout();
});

$("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await client.useToken($("token").value.trim());
    refreshState();
  } catch (error) {
    say(error.status === 401 ? "Wrong token." : error.message);
  }
});

// --- tabs and theme ---

const TABS = ["talk", "see", "watch"].filter((name) => name !== "watch" || client.features.watch);

function open(tab) {
  memory.tab = TABS.includes(tab) ? tab : "talk";
  for (const name of ["talk", "see", "watch"]) {
    const isOpen = name === memory.tab;
    $(name).hidden = !isOpen;
    $(`tab-${name}`).setAttribute("aria-selected", String(isOpen));
    $(`tab-${name}`).tabIndex = isOpen ? 0 : -1;
  }
  changed();
  if (memory.tab === "talk") toEnd();
  else scrollTo(0, 0);
  if (memory.tab === "watch") watch();
}

for (const name of ["talk", "see", "watch"]) {
  const tab = $(`tab-${name}`);
  tab.hidden = !TABS.includes(name);
  tab.addEventListener("click", () => open(name));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = TABS[(TABS.indexOf(name) + move + TABS.length) % TABS.length];
    open(next);
    $(`tab-${next}`).focus();
  });
}

const dark = matchMedia("(prefers-color-scheme: dark)");
function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "☀" : "☾";
}
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("smallmind theme", theme); } catch { /* for this visit only */ }
  useTheme(theme);
});
let theme = null;
try { theme = localStorage.getItem("smallmind theme"); } catch { /* no storage */ }
useTheme(theme ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!theme) useTheme(dark.matches ? "dark" : "light"); });

// --- talk ---

let stopping = null; // the AbortController of the answer that is being written

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "n"];
const fields = () => [...$("settings").querySelectorAll("input, textarea")];

// The settings that a request has: fields that are not empty.
function settingsNow() {
  const found = {};
  for (const { name, value } of fields()) {
    if (name === "system" || value.trim() === "") continue;
    found[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  return found;
}

for (const field of fields()) {
  field.addEventListener("input", () => {
    memory.settings[field.name] = field.value;
    changed();
  });
}

const textOf = (turn) => (turn.role === "user" ? turn.text : turn.answers[turn.kept].text);

// The turns before one, as the API takes them.
function asked(count) {
  const before = memory.turns.slice(0, count), model = known();
  if (model.kind !== "chat") return { prompt: textOf(before[count - 1]) };
  const system = $("settings").querySelector("[name=system]").value;
  const messages = before.map((turn) => ({ role: turn.role, content: textOf(turn) }));
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
}

// Writes the answer to the turns before place; from `begun` tokens of it on, if there are any.
async function answer(place, begun = null) {
  const model = known();
  if (!model || stopping) return;
  const { n = 1, ...settings } = settingsNow();
  const turn = {
    role: "assistant", kept: 0,
    answers: begun
      ? [{ text: begun.map((token) => token.text).join(""), tokens: begun, ended: null }]
      : Array.from({ length: n }, () => ({ text: "", tokens: [], ended: null })),
  };
  if (begun?.base !== undefined) Object.assign(turn.answers[0], { text: begun.base, thought: begun.thought });
  memory.turns.splice(place, memory.turns.length, turn);
  stopping = new AbortController();
  showTurns();
  showWriting(true);
  toEnd();
  const start = performance.now();
  let count = 0;
  const request = { model: model.id, kind: model.kind, ...asked(place), settings, n: turn.answers.length, top: TOP };
  if (begun) request.prefix_tokens = begun.map((token) => token.id);
  if (memory.think !== undefined && model.kind === "chat") request.enable_thinking = memory.think;
  const tell = ({ index, text, thought = "", tokens, finish_reason }) => {
    const one = turn.answers[index];
    one.text += text;
    one.thought = (one.thought ?? "") + thought;
    one.tokens.push(...tokens);
    one.ended = finish_reason ?? one.ended;
    count += tokens.length;
    follow(() => {
      showThought(said(place, index)?.previousElementSibling, one);
      said(place, index)?.append(text);
    });
    changed();
  };
  try {
    await client.complete(request, tell, stopping.signal);
    const speed = count / (performance.now() - start) * 1000;
    const shown = speed < 10 ? speed.toFixed(1) : whole(Math.round(speed));
    $("status").textContent = `${whole(count)} tokens, ${shown} per second`;
  } catch (error) {
    for (const one of turn.answers) one.ended ??= "stopped";
    if (error.name === "AbortError") $("status").textContent = "Stopped.";
    else {
      $("status").textContent = error.message;
      if (error.status === 401) $("token-form").hidden = false;
      if (error.gone) miss(error);
    }
  }
  stopping = null;
  follow(() => { showWriting(false); showTurns(); });
  $("announced").textContent = turn.answers.map((one) => one.text).join("\n"); // is read aloud
  remember();
}

const said = (place, index) => $("turns").children[place]?.querySelectorAll(".answer .said")[index];

const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

// Keeps the end in view through a change, unless the reader has scrolled up.
function follow(change) {
  const root = document.documentElement;
  const isAtEnd = root.scrollHeight - root.scrollTop - root.clientHeight < 160;
  change();
  if (isAtEnd) toEnd();
}

function showWriting(writes) {
  $("send").hidden = writes;
  $("stop").hidden = !writes;
  if (writes) $("status").textContent = "Writing …";
}

function action(text, label, run) {
  const button = make("button", { type: "button", className: "quiet", "aria-label": label }, text);
  button.addEventListener("click", run);
  return button;
}

function showTurns() {
  const isChat = known()?.kind === "chat";
  $("turns").replaceChildren(...memory.turns.map((turn, place) => {
    if (turn.role === "user") return userTurn(turn, place, isChat);
    return answerTurn(turn, place);
  }));
}

function userTurn(turn, place, isChat) {
  const text = make("div", { className: "said" }, turn.text);
  const edit = () => {
    const field = make("textarea", { value: turn.text, rows: 3, "aria-label": "The message" });
    const again = () => {
      if (stopping || !known() || !field.value.trim()) return;
      memory.turns.splice(place, memory.turns.length, { role: "user", text: field.value });
      answer(place + 1);
      $("input").focus();
    };
    const leave = () => { showTurns(); $("turns").children[place].querySelector("button").focus(); };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      again();
    });
    const buttons = make("div", { className: "actions" },
      action("Send again", "Send the edited message, replacing everything after it", again),
      action("Cancel", "Discard the changes", leave));
    text.replaceWith(field);
    actions.replaceWith(buttons);
    field.focus();
  };
  const actions = make("div", { className: "actions" }, action("Edit", "Edit this message and try again", edit));
  return make("li", { className: "turn user" },
    make("div", { className: "who" }, isChat ? "You" : "Prompt"), text, actions);
}

function answerTurn(turn, place) {
  const writes = stopping && place === memory.turns.length - 1;
  const answers = turn.answers.map((one, index) => {
    const text = make("div", { className: "said" }, one.text);
    if (writes && !one.ended) text.classList.add("caret");
    const thought = make("details", { className: "thought" }, make("summary", {}, "Thought"), make("div"));
    showThought(thought, one);
    const actions = make("div", { className: "actions" });
    if (!writes) {
      if (one.tokens.length) {
        actions.append(action("See", "See the probabilities of this answer", () => seeAnswer(place, index)));
        if (one.ended === "length" || one.ended === "stopped" || one.ended === null) {
          const rest = Object.assign([...one.tokens], { base: one.text, thought: one.thought });
          actions.append(action("Continue", "Continue this answer", () => answer(place, rest)));
        }
      }
      if (turn.answers.length > 1) {
        const keep = () => { turn.kept = index; showTurns(); changed(); };
        const chosen = turn.kept === index;
        actions.append(action(chosen ? "Kept" : "Keep", `Continue the conversation from answer ${index + 1}`, keep));
      }
      if (index === 0) actions.append(action("Try again", "Write another answer", () => answer(place)));
    }
    const kept = turn.answers.length > 1 && turn.kept === index ? " kept" : "";
    return make("div", { className: `answer${kept}` }, thought, text, actions);
  });
  const several = answers.length > 1 ? " several" : "";
  return make("li", { className: "turn assistant" },
    make("div", { className: "who" }, memory.model), make("div", { className: `answers${several}` }, ...answers));
}

// Thoughts are folded away: a click shows them.
function showThought(element, one) {
  if (!element) return;
  element.hidden = !one.thought;
  element.lastChild.textContent = one.thought ?? "";
}

// /think and /no_think, alone, say whether answers begin with a thought where the model can do both.
function obeys(command) {
  if (command !== "/think" && command !== "/no_think") return false;
  memory.think = command === "/think";
  const how = memory.think ? "think before they answer" : "answer without thinking";
  $("status").textContent = `Models that can do both now ${how}.`;
  return true;
}

function send() {
  const text = $("input").value, model = known();
  if (!model || stopping) return;
  if (!text.trim() && model.kind === "chat") return;
  if (model.kind === "chat" && obeys(text.trim())) {
    $("input").value = memory.draft = "";
    changed();
    return;
  }
  memory.turns.push({ role: "user", text: text || model.opening });
  $("input").value = memory.draft = "";
  answer(memory.turns.length);
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("input", () => { memory.draft = $("input").value; changed(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
// What has the focus is scrolled to between the bar and the composer, which stay in place.
const staying = new ResizeObserver(() => {
  const { style } = document.documentElement;
  style.scrollPaddingTop = `${document.querySelector(".bar").offsetHeight}px`;
  style.scrollPaddingBottom = `${$("dock").offsetHeight}px`;
});
staying.observe(document.querySelector(".bar"));
staying.observe($("dock"));
$("stop").addEventListener("click", () => stopping?.abort());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  stopping?.abort();
  $("chosen").classList.remove("open");
});

$("new").addEventListener("click", () => {
  stopping?.abort();
  memory.turns = [];
  $("status").textContent = "";
  showTurns();
  changed();
  $("input").focus();
});

$("save").addEventListener("click", () => {
  const saved = { format: "smallmind conversation 1", model: memory.model, settings: memory.settings,
    messages: memory.turns.map((turn) => ({ role: turn.role, content: textOf(turn) })), turns: memory.turns };
  const address = URL.createObjectURL(new Blob([JSON.stringify(saved, null, 1)], { type: "application/json" }));
  const link = make("a", { href: address, download: "conversation.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
});
$("load").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const file = $("file").files[0];
  $("file").value = "";
  if (!file) return;
  try {
    const found = JSON.parse(await file.text());
    const turns = checkedTurns(found?.turns ?? found?.messages ?? found);
    stopping?.abort();
    memory.turns = turns;
    useSettings(found.settings);
    $("status").textContent = `Loaded ${file.name}.`;
    showTurns();
    changed();
  } catch (error) {
    const why = error instanceof SyntaxError ? "it is not JSON" : error.message;
    $("status").textContent = `${file.name} cannot be loaded: ${why}.`;
  }
});

// Turns from a file -> the same as this page has them. An error says what is wrong.
function checkedTurns(found) {
  if (!Array.isArray(found)) throw new Error("it has no list of turns");
  return found.filter((turn) => turn?.role !== "system").map((turn, i) => {
    const wrong = (what) => new Error(`turn ${i + 1} ${what}`);
    if (turn?.role === "user") {
      const text = turn.text ?? turn.content;
      if (typeof text !== "string") throw wrong("has no text");
      return { role: "user", text };
    }
    if (turn?.role !== "assistant") throw wrong("has neither the role user nor assistant");
    const answers = turn.answers ?? [{ text: turn.content, tokens: [], ended: "stop" }];
    if (!Array.isArray(answers) || !answers.length) throw wrong("has no answers");
    const checked = answers.map((one) => {
      if (typeof one?.text !== "string") throw wrong("has no text");
      const tokens = Array.isArray(one.tokens) ? one.tokens.filter(isToken) : [];
      const thought = typeof one.thought === "string" ? one.thought : "";
      return { text: one.text, thought, tokens, ended: typeof one.ended === "string" ? one.ended : "stopped" };
    });
    const kept = Number.isInteger(turn.kept) && turn.kept in checked ? turn.kept : 0;
    return { role: "assistant", answers: checked, kept };
  });
}

const isToken = (token) => Number.isInteger(token?.id) && typeof token.text === "string"
  && Number.isFinite(token.logprob) && Number.isFinite(token.entropy)
  && Array.isArray(token.top) && token.top.every((other) => Array.isArray(other)
    && Number.isInteger(other[0]) && typeof other[1] === "string" && Number.isFinite(other[2]));

// Shows settings that were kept; those that are not text are left out.
function useSettings(found) {
  for (const field of fields()) {
    const value = found?.[field.name];
    if (typeof value !== "string") continue;
    field.value = memory.settings[field.name] = value;
  }
}

// --- see ---

const BINS = [[0.5, "", "over 50%"], [0.2, "p1", "20 to 50%"], [0.05, "p2", "5 to 20%"],
  [0.01, "p3", "1 to 5%"], [0, "p4", "under 1%"]];
// place: of the answer in the conversation, before which stand `given` tokens; -1: a pasted text
let shown = { tokens: [], place: -1, given: 0 };
let attention = { key: "", rows: null };

const bin = (token) => BINS.find(([least]) => Math.exp(token.logprob) >= least)[1];

$("legend").append(...BINS.map(([, name, text]) => make("span", { className: name }, text)));

async function seeAnswer(place, index) {
  const { tokens } = memory.turns[place].answers[index], model = known();
  const losses = tokens.reduce((sum, token) => sum - token.logprob, 0);
  $("measured").textContent = `The answer: ${facts(tokens.length, losses / tokens.length)}`;
  showTokens({ tokens, place, given: 0 });
  open("see");
  if (!model) return;
  // What the answer was written after: heads look at it too. One too long for the model is left out.
  const { prompt: text, messages } = asked(place), now = shown;
  const before = await client.inspect({ model: model.id, ...(messages ? { messages } : { text }), top: TOP })
    .catch(() => null);
  if (before && now === shown) {
    showTokens({ tokens: [...before.tokens, ...tokens], place, given: before.tokens.length });
  }
}

const facts = (count, loss) =>
  `${whole(count)} tokens, loss ${loss.toFixed(3)} nats per token, perplexity ${Math.exp(loss).toFixed(1)}`;

$("measure").addEventListener("submit", async (event) => {
  event.preventDefault();
  const model = known(), text = $("text").value;
  if (!model || !text) return;
  $("measured").textContent = "Measuring …";
  try {
    const { tokens, loss } = await client.inspect({ model: model.id, text, top: TOP });
    $("measured").textContent = loss === null ? "A single token: nothing to predict." : facts(tokens.length, loss);
    showTokens({ tokens, place: -1, given: 0 });
  } catch (error) {
    $("measured").textContent = error.message;
  }
});

const visible = (text) => text.replace(/\n/g, "↵\n").replace(/^$/, "∅");
const alone = (text) => visible(text).replace(/ /g, "␣").trimEnd(); // spaces and lines are seen too

function showTokens(given) {
  shown = given;
  attention = { key: "", rows: null };
  $("seen").hidden = false;
  $("chosen").classList.remove("open");
  const elements = shown.tokens.map((token, i) => {
    const isFirst = token.logprob === null;
    const label = isFirst ? `${token.text}, the first token` : `${token.text}, ${percent(token.logprob)}`;
    const element = make("span", {
      className: `token ${i < shown.given ? "given" : isFirst ? "" : bin(token)}`, role: "option", "aria-selected": "false",
      "aria-label": label, title: isFirst ? "the first token" : `${percent(token.logprob)}, loss ${(-token.logprob).toFixed(2)}`,
      tabIndex: i === 0 ? 0 : -1,
    }, visible(token.text));
    element.addEventListener("click", () => { choose(i); $("chosen").classList.add("open"); });
    element.addEventListener("focus", () => attend(i));
    element.addEventListener("pointerenter", () => attend(i));
    return element;
  });
  $("tokens").replaceChildren(...elements);
  drawEntropies();
  const predicted = shown.tokens.map((token, i) => [token.logprob, i])
    .filter(([logprob, i]) => logprob !== null && i >= shown.given);
  if (predicted.length) choose(predicted.reduce((least, one) => (one[0] < least[0] ? one : least))[1]);
  else $("chosen").replaceChildren(make("p", { className: "note" }, "Click a token to see the alternatives."));
}

$("tokens").addEventListener("keydown", (event) => {
  const elements = [...$("tokens").children], now = elements.indexOf(document.activeElement);
  if (now < 0) return;
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: elements.length - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    elements[now].click();
  } else if (next !== undefined && elements[next]) {
    event.preventDefault();
    elements[now].tabIndex = -1;
    elements[next].tabIndex = 0;
    elements[next].focus();
  }
});

function choose(i) {
  const token = shown.tokens[i];
  [...$("entropies").children].forEach((bar, j) => bar.classList.toggle("now", i === j));
  [...$("tokens").children].forEach((element, j) => element.setAttribute("aria-selected", String(i === j)));
  if (token.logprob === null) {
    $("chosen").replaceChildren(make("p", { className: "note" }, "The first token is given, not predicted."));
    return;
  }
  const isAmong = token.top.some(([id]) => id === token.id);
  const all = isAmong ? token.top : [...token.top, [token.id, token.text, token.logprob]];
  const rows = all.map(([id, text, logprob]) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    const row = make("li", { className: id === token.id ? "mine" : "" }, make("code", {}, alone(text)),
      make("span", { className: "track", "aria-hidden": "true" }, bar),
      make("span", { className: "amount" }, percent(logprob)));
    if (shown.place >= 0 && i >= shown.given && id !== token.id) {
      const run = () => goOnFrom(i, { id, text, logprob, entropy: token.entropy, top: token.top });
      row.append(action("Continue", `Continue from here: ${alone(text)}`, run));
    }
    return row;
  });
  const about = `probability ${percent(token.logprob)}, loss ${(-token.logprob).toFixed(3)}, entropy ${token.entropy.toFixed(2)} nats`;
  $("chosen").replaceChildren(make("h3", {}, "“", make("code", {}, alone(token.text)), "”"),
    make("p", { className: "note" }, about), make("ol", { className: "others" }, ...rows));
}

function goOnFrom(i, token) {
  open("talk");
  answer(shown.place, [...shown.tokens.slice(shown.given, i), token]);
}

let looked = -1, looking = false; // the token that is looked at, and whether a model is asked

async function attend(i) {
  looked = i;
  if (looking || !$("attends").checked || !known()) return;
  const [layer, head] = [Number($("layer").value), Number($("head").value)];
  // The model sees a window of a longer text: one that reaches back from this token far enough.
  const window = known().block_size, half = Math.max(1, Math.floor(window / 2));
  const longest = Math.max(0, shown.tokens.length - window);
  const first = Math.max(0, Math.min(longest, Math.floor(i / half) * half - half));
  const ids = shown.tokens.slice(first, first + window).map((token) => token.id);
  const key = `${memory.model} ${layer} ${head} ${first}`;
  if (attention.key !== key) {
    attention = { key, rows: null };
    looking = true;
    try {
      const { weights } = await client.attention({ model: memory.model, ids, layer, head });
      if (attention.key === key) attention.rows = weights;
    } catch (error) {
      attention.key = "";
      $("measured").textContent = error.message;
      return;
    } finally {
      looking = false;
    }
    if (looked >= 0) attend(looked); // perhaps another one by now
    return;
  }
  const row = attention.rows?.[i - first];
  if (!row) return;
  [...$("tokens").children].forEach((element, j) => {
    element.classList.toggle("attended", j <= i);
    element.style.setProperty("--weight", `${Math.round(80 * (row[j - first] ?? 0))}%`);
  });
  $("tokens").classList.add("attending");
}

function lookAway() {
  looked = -1;
  $("tokens").classList.remove("attending");
  for (const element of $("tokens").children) element.classList.remove("attended");
}
$("tokens").addEventListener("pointerleave", lookAway);
$("attends").addEventListener("change", () => { if (!$("attends").checked) lookAway(); });
for (const id of ["layer", "head"]) $(id).addEventListener("change", () => { $("attends").checked = true; });

function drawEntropies() {
  const values = shown.tokens.map((token) => token.entropy ?? 0), chart = $("entropies");
  const width = Math.max(1, values.length), most = Math.max(1, ...values);
  chart.setAttribute("viewBox", `0 0 ${width} 64`);
  chart.setAttribute("preserveAspectRatio", "none");
  chart.replaceChildren(...values.map((value, i) => {
    return svg("rect", { x: i + 0.1, y: 64 - (60 * value) / most, width: 0.8, height: (60 * value) / most });
  }));
}

// --- watch ---

let watched = "", watching = false, nextLook = 0;

async function watch() {
  if (watching || memory.tab !== "watch") return;
  clearTimeout(nextLook);
  watching = true;
  try {
    const { runs } = await client.runs();
    if (!runs.some((run) => run.name === watched)) watched = runs[0]?.name ?? "";
    showRuns(runs);
    const name = watched;
    if (name) {
      const run = await client.run(name);
      if (name === watched) showRun(run);
    }
  } catch (error) {
    if (error.gone) miss(error);
    else say(error.message);
  }
  watching = false;
  nextLook = setTimeout(() => { if (!document.hidden) watch(); }, 2000);
}

async function watchRun(name, runs) {
  watched = name;
  showRuns(runs);
  try { showRun(await client.run(name)); } catch { /* the next look says why */ }
}
$("run").addEventListener("change", () => watchRun($("run").value, listedRuns));

let listedRuns = [];

// The buttons stay, so that the one with the focus keeps it. A phone has a list in their place.
function showRuns(runs) {
  const isListed = runs.length === listedRuns.length && runs.every((run, i) => run.name === listedRuns[i].name);
  listedRuns = runs;
  if (!isListed) $("run").replaceChildren(...runs.map(({ name }) => make("option", { value: name }, name)));
  $("run").value = watched;
  const buttons = new Map([...$("runs").children].map((button) => [button.dataset.run, button]));
  const now = runs.map((run) => {
    const button = buttons.get(run.name) ?? make("button", { type: "button" }, run.name, make("small"));
    if (!button.dataset.run) {
      button.dataset.run = run.name;
      button.addEventListener("click", () => watchRun(run.name, runs));
    }
    const small = `${run.state}, step ${whole(run.step)}${run.steps ? ` of ${whole(run.steps)}` : ""}`;
    button.lastChild.textContent = small;
    button.setAttribute("aria-current", String(run.name === watched));
    return button;
  });
  const isSame = now.length === buttons.size && now.every((button, i) => button === $("runs").children[i]);
  if (!isSame) $("runs").replaceChildren(...now);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) watch(); });

let drawn = ""; // what is shown: it is drawn again only if it has changed

function showRun(run) {
  const now = JSON.stringify(run);
  if (now === drawn || run.name !== watched) return;
  drawn = now;
  const hasFocus = $("course").querySelector("button.main") === document.activeElement;
  const facts = [["State", run.state], ["Step", run.steps ? `${whole(run.step)} of ${whole(run.steps)}` : whole(run.step)]];
  if (run.final_loss !== null) facts.push(["Final held-out loss", run.final_loss.toFixed(4)]);
  else if (run.loss !== null) facts.push(["Best held-out loss", run.loss.toFixed(4)]);
  if (run.seconds) facts.push(["Training time", duration(run.seconds)]);
  if (run.left_seconds !== null) facts.push(["Time left", duration(run.left_seconds)]);
  if (run.tokens_per_second) facts.push(["Tokens/s", whole(Math.round(run.tokens_per_second))]);
  if (run.share !== null) facts.push(["Share of peak speed", `${Math.round(100 * run.share)}%`]);
  const list = make("dl", { className: "facts" }, ...facts.map(
    ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const talkTo = action("Talk to the newest checkpoint", `Talk to ${run.name}`, () => {
    memory.model = run.model;
    showModels(models);
    open("talk");
  });
  talkTo.className = "main";
  talkTo.disabled = !run.model;
  const head = make("div", { className: "row" }, make("h3", {}, run.name), make("span", { className: "grow" }), talkTo);
  const parts = [head, list, make("figure", {}, ...drawing(run.chart))];
  parts.push(...run.notes.map((note) => make("p", { className: "note" }, note)));
  if (run.samples.length) parts.push(make("h3", {}, "Samples"));
  for (const { step, text } of [...run.samples].reverse().slice(0, 5)) {
    parts.push(make("div", { className: "note" }, `After step ${whole(step)}`), make("pre", { className: "sample" }, text));
  }
  const report = make("details", {}, make("summary", {}, "Report"));
  report.addEventListener("toggle", () => {
    if (report.open && report.children.length === 1) {
      report.append(make("iframe", { sandbox: "", src: client.report(run.name), title: `Report of ${run.name}` }));
    }
  });
  const before = $("course").querySelector("details[open]");
  report.dataset.run = run.name;
  if (before?.dataset.run === run.name) {
    // A frame that is moved is loaded again: what stands before it is replaced.
    while (before.previousSibling) before.previousSibling.remove();
    before.before(...parts);
  } else {
    $("course").replaceChildren(...parts, report);
  }
  if (hasFocus) talkTo.focus();
}

// The elements of a chart that the server has drawn, in which names are escaped.
const drawing = (html) => new DOMParser().parseFromString(html, "text/html").body.children;

// --- start ---

recall();
$("form").hidden = Boolean(window.smallmindClient); // it takes a server
useSettings(memory.settings);
$("input").value = memory.draft;
showTurns();
open(memory.tab);
const given = /^#token=(.+)$/.exec(location.hash);
if (given && client.useToken) {
  history.replaceState(null, "", location.pathname);
  client.useToken(decodeURIComponent(given[1])).catch(() => {}).then(refreshState);
} else {
  refreshState();
}
