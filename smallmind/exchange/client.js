// What the page asks, answered by the model in the file instead of a server: page.js says how.
"use strict";

window.smallmindClient = (() => {
  const ROOM = 4; // an answer has a fourth of the context at least
  const REASONS = { end: "stop", stop: "stop", length: "length" };
  const content = (id) => document.getElementById(id).textContent;
  const about = JSON.parse(content("smallmind-about"));
  const program = new smallmindModel.Program(about, content("smallmind-weights"));
  const { n_layer, n_head, block_size } = about.config;
  const model = {
    id: about.name, name: about.name, kind: about.template ? "chat" : "completion", step: null,
    parameters: about.parameters, block_size, layers: n_layer, heads: n_head,
    opening: about.opening, error: null,
  };
  const textOf = (id) => program.tokenizer.decode([id]);
  const othersOf = (top) => top.map(({ id, logprob }) => [id, textOf(id), logprob]);

  // Messages -> what the model is asked: as many of the latest as it sees, and the system's text.
  function conversation(messages, most) {
    const room = Math.min(Math.max(1, Math.floor(block_size / ROOM)), most || 1);
    const system = messages.filter(({ role }) => role === "system");
    const turns = messages.filter(({ role }) => role !== "system");
    const questions = turns.flatMap(({ role }, i) => (role === "user" && i ? [i] : []));
    let ids = [];
    for (const first of [0, ...questions]) {
      ids = program.template.prompt(program.tokenizer, [...system, ...turns.slice(first)]);
      if (ids.length + room <= block_size) return ids;
    }
    throw new Error(
      `the question has ${ids.length} tokens, and the model sees ${block_size}, of which ${room} ` +
        "are for the answer: make it shorter",
    );
  }

  // Writes one answer, and tells of each token.
  async function write(index, ids, settings, lead, tell, signal) {
    let isBegun = settings.begun.length > 0;
    for await (const one of program.write(ids, settings, signal)) {
      let text = one.piece;
      if (text && !isBegun) {
        if (text.startsWith(lead)) text = text.slice(lead.length);
        isBegun = true;
      }
      const ends = one.id === undefined || program.ends.has(one.id);
      const tokens = ends
        ? []
        : [{ ...one, text: textOf(one.id), top: othersOf(one.top) }];
      tell({ index, text, tokens, finish_reason: one.ended ? REASONS[one.ended] : null });
    }
  }

  return {
    program,
    features: { watch: false, attention: true },
    state: async () => ({ models: [model], runs: [], limits: {} }),
    async complete(asked, tell, signal) {
      const { settings, n = 1, top, prefix_tokens = [] } = asked;
      const isChat = asked.kind === "chat";
      let most = settings.max_tokens ?? 500;
      const ids = isChat
        ? conversation(asked.messages, most)
        : program.prompt(asked.prompt);
      if (isChat) most = Math.min(most, block_size - ids.length);
      const seed = settings.seed ?? Math.floor(Math.random() * 2 ** 31);
      const lead = isChat ? about.template.lead : "";
      for (let index = 0; index < n; index++) {
        const own = { ...settings, max_tokens: most, seed: seed + index, top, begun: prefix_tokens };
        await write(index, ids, own, lead, tell, signal);
      }
    },
    async inspect({ text, ids, messages, top }) {
      const given = ids ?? (messages ? conversation(messages, 1) : program.prompt(text));
      const tokens = (await program.inspect(given, top)).map((token) => ({
        ...token, text: textOf(token.id), top: othersOf(token.top),
      }));
      const sum = tokens.slice(1).reduce((total, { logprob }) => total - logprob, 0);
      return { tokens, loss: tokens.length > 1 ? sum / (tokens.length - 1) : null };
    },
    async attention({ ids, layer, head }) {
      return { weights: await program.attention(ids, layer, head) };
    },
  };
})();
