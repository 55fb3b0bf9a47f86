// A small language model in plain JavaScript: its weights, its forward pass, its tokenizer, and
// how it writes. A page that `smallmind export --to html` wrote has it inside, with its model.
//
// It computes what smallmind/nn computes in Python, layer by layer: C channels, H heads of queries,
// G of keys and values, D channels of a head, V tokens, T tokens of a text. Sums are of float64, so
// results differ from those of Python by the rounding of float32 there.
"use strict";

const smallmindModel = (() => {
  const SLICE = 12; // milliseconds that are computed before the page gets its turn
  const REFED = 4; // a full cache with learned positions drops one token in this many

  // ---------------------------------------------------------------------------------- numbers

  // Base64 -> its bytes.
  function bytesOf(base64) {
    const PART = 1 << 20; // characters, a multiple of 4
    const parts = [];
    let size = 0;
    for (let start = 0; start < base64.length; start += PART) {
      const part = atob(base64.slice(start, start + PART));
      parts.push(part);
      size += part.length;
    }
    const bytes = new Uint8Array(size);
    let place = 0;
    for (const part of parts) {
      for (let i = 0; i < part.length; i++) bytes[place++] = part.charCodeAt(i);
    }
    return bytes;
  }

  // The bits of a float16 -> its value.
  const float16 = (() => {
    const bits = new Uint32Array(1), value = new Float32Array(bits.buffer);
    return (half) => {
      bits[0] = (half & 0x7fff) << 13; // exponent and fraction of a number 2^112 times as small
      return (half & 0x8000 ? -1 : 1) * value[0] * 2 ** 112;
    };
  })();

  // How numbers are stored: the bytes of some (N) -> Float32Array (N).
  const READERS = {
    f32: (bytes) => new Float32Array(bytes.buffer),
    f16: (bytes) => Float32Array.from(new Uint16Array(bytes.buffer), float16),
    // Blocks of 32 integers after their scale, a float16.
    q8_0(bytes) {
      const view = new DataView(bytes.buffer), values = new Float32Array((bytes.length / 34) * 32);
      for (let i = 0, place = 0; place < bytes.length; place += 34) {
        const scale = float16(view.getUint16(place, true));
        for (let j = 0; j < 32; j++) values[i++] = scale * view.getInt8(place + 2 + j);
      }
      return values;
    },
  };

  // x (I), w (O, I) -> y (O) = w x [+ bias]. Four rows at a time, as each x is then read once.
  function multiply(y, w, x, bias) {
    const I = x.length, O = y.length;
    let o = 0;
    for (; o + 3 < O; o += 4) {
      let p0 = o * I, p1 = p0 + I, p2 = p1 + I, p3 = p2 + I;
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      for (let i = 0; i < I; i++) {
        const value = x[i];
        s0 += w[p0++] * value;
        s1 += w[p1++] * value;
        s2 += w[p2++] * value;
        s3 += w[p3++] * value;
      }
      y[o] = s0;
      y[o + 1] = s1;
      y[o + 2] = s2;
      y[o + 3] = s3;
    }
    for (; o < O; o++) {
      let sum = 0;
      for (let i = 0, p = o * I; i < I; i++) sum += w[p++] * x[i];
      y[o] = sum;
    }
    if (bias) add(y, bias);
  }

  // x -> x + y, in place.
  function add(x, y) {
    for (let i = 0; i < x.length; i++) x[i] += y[i];
  }

  // x, other (N) -> x = a x + b other, in place.
  function mix(x, other, [a, b]) {
    for (let i = 0; i < x.length; i++) x[i] = a * x[i] + b * other[i];
  }

  // Scores -> probabilities, in place.
  function softmax(scores) {
    let top = -Infinity, sum = 0;
    for (const score of scores) top = Math.max(top, score);
    for (let i = 0; i < scores.length; i++) sum += scores[i] = Math.exp(scores[i] - top);
    for (let i = 0; i < scores.length; i++) scores[i] /= sum;
  }

  // The norms before attention, perceptron and head: x (C) -> y (C).
  const NORMS = {
    layernorm(y, x, { weight, bias }, epsilon) {
      const C = x.length;
      let mean = 0, variance = 0;
      for (let i = 0; i < C; i++) mean += x[i];
      mean /= C;
      for (let i = 0; i < C; i++) variance += (x[i] - mean) ** 2;
      const rstd = 1 / Math.sqrt(variance / C + epsilon);
      for (let i = 0; i < C; i++) y[i] = (x[i] - mean) * rstd * weight[i];
      if (bias) add(y, bias);
    },
    rmsnorm(y, x, { weight }, epsilon) {
      const C = x.length;
      let sum = 0;
      for (let i = 0; i < C; i++) sum += x[i] * x[i];
      const rstd = 1 / Math.sqrt(sum / C + epsilon);
      for (let i = 0; i < C; i++) y[i] = x[i] * rstd * weight[i];
    },
  };

  // GELU in its tanh form.
  function gelu(x) {
    return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
  }

  // The normal distribution function, as kernels/gelu_erf.py has it.
  const TAIL = [
    0.03588922928699737, -0.14181362944094184, 0.15544997098645164, -0.015278182988320593,
    0.11032234637182552, 0.10770201738816898, 0.12407225672484476, 0.12365607342023367, 0,
  ];
  function phi(x) {
    const t = 1 / (1 + 0.31 * Math.abs(x));
    const tail = Math.exp(-0.5 * x * x) * TAIL.reduce((q, c) => q * t + c);
    return x < 0 ? tail : 1 - tail;
  }

  // The activations of the perceptron: x, the expansion -> y (W).
  const MLPS = {
    gelu(y, x) {
      for (let i = 0; i < y.length; i++) y[i] = gelu(x[i]);
    },
    gelu_erf(y, x) {
      for (let i = 0; i < y.length; i++) y[i] = x[i] * phi(x[i]);
    },
    relu2(y, x) {
      for (let i = 0; i < y.length; i++) y[i] = Math.max(x[i], 0) ** 2;
    },
    swiglu(y, x) {
      const W = y.length;
      for (let i = 0; i < W; i++) y[i] = (x[i] / (1 + Math.exp(-x[i]))) * x[W + i];
    },
    geglu(y, x) {
      const W = y.length;
      for (let i = 0; i < W; i++) y[i] = gelu(x[i]) * x[W + i];
    },
  };

  // -------------------------------------------------------------------------------- the model

  // What a model keeps of a text: the keys and values of its last S tokens, and room to compute.
  class Cache {
    constructor(config, length) {
      const { n_layer: L, n_embd: C, n_head: H, n_kv_head: G, head_size: D } = config;
      const array = (size) => new Float64Array(size);
      this.length = length; // S
      this.keys = Array.from({ length: L }, () => new Float32Array(length * G * D));
      this.values = Array.from({ length: L }, () => new Float32Array(length * G * D));
      this.ids = new Int32Array(length); // the last ones, each at its number modulo S
      this.clear();
      this.x = array(C); // the residual stream
      this.embedding = array(C); // as it began
      this.normed = array(C);
      this.branch = array(C);
      this.qkv = array((H + 2 * G) * D);
      this.firstValues = array(G * D);
      this.heads = array(H * D);
      const W = config.hidden_size;
      this.expansion = array(config.mlp.endsWith("glu") ? 2 * W : W); // a gate beside it
      this.activation = array(W);
      this.logits = array(config.vocab_size);
    }

    clear() {
      this.start = 0; // tokens so far
      this.previous = 0; // the last one
      this.document = 0; // where the current one began
    }

    last(count) {
      const at = (_, i) => this.ids[(this.start - count + i) % this.length];
      return Array.from({ length: count }, at);
    }
  }

  class Model {
    // config: the fields of ModelConfig, and settings of each block; tensors: name -> Float32Array, matrices as (out, in).
    constructor(config, tensors) {
      this.config = config;
      this.tensors = tensors;
      this.norm = NORMS[config.norm];
      this.activate = MLPS[config.mlp];
      this.limitsContext = config.position === "learned";
      this.isParallel = config.block === "parallel" && (config.parallel_residual ?? true);
      const isSandwich = config.block === "sandwich"; // norms after the branches too
      const part = (name) => ({
        weight: tensors.get(`${name}.weight`),
        bias: tensors.get(`${name}.bias`),
      });
      this.token = part("token_embedding").weight;
      this.position = part("position_embedding").weight;
      this.bigram = part("bigram_embedding").weight;
      this.blocks = config.blocks.map((settings, i) => ({
        ...settings, // window and frequencies
        residual: part(`blocks.${i}.embedding_residual`).weight,
        attentionNorm: part(`blocks.${i}.attention_norm`),
        qkv: part(`blocks.${i}.attention.qkv`),
        valueResidual: part(`blocks.${i}.attention.value_residual`).weight,
        queryGain: part(`blocks.${i}.attention.query_norm`).weight,
        keyGain: part(`blocks.${i}.attention.key_norm`).weight,
        projection: part(`blocks.${i}.attention.projection`),
        mlpNorm: part(`blocks.${i}.mlp_norm`),
        expansion: part(`blocks.${i}.mlp.expansion`),
        mlpProjection: part(`blocks.${i}.mlp.projection`),
        attentionPostNorm: isSandwich && part(`blocks.${i}.attention_post_norm`),
        mlpPostNorm: isSandwich && part(`blocks.${i}.mlp_post_norm`),
      }));
      this.finalNorm = part("final_norm");
      this.head = config.tie_weights ? this.token : part("head").weight;
    }

    cache(length = this.config.block_size) {
      return new Cache(this.config, Math.min(length, this.config.block_size));
    }

    // The next tokens of a text -> logits (V) after the last, Float32Array. Yields now and then.
    *decode(cache, ids) {
      for (const id of ids) {
        if (cache.start >= cache.length && this.limitsContext) {
          // Positions are used up: the oldest quarter goes, the rest begins anew.
          const S = cache.length;
          const kept = cache.last(S - Math.max(1, Math.floor(S / REFED)));
          cache.clear();
          for (const earlier of kept) yield* this.step(cache, earlier);
        }
        yield* this.step(cache, id);
      }
      return this.logits(cache);
    }

    // The next token of a text -> the residual stream after it, in cache.x. `look`, if given, is
    // called with the layer, the head and the probabilities with which it looks at earlier tokens.
    *step(cache, id, look) {
      const { x, normed, branch, expansion, activation } = cache;
      const { norm_epsilon: epsilon } = this.config;
      if (id === this.config.document_token) cache.document = cache.start;
      this.embed(cache, id);
      cache.embedding.set(x);
      for (const [layer, block] of this.blocks.entries()) {
        if (block.residual) mix(x, cache.embedding, block.residual);
        this.norm(normed, x, block.attentionNorm, epsilon);
        this.attend(cache, block, layer, look);
        multiply(branch, block.projection.weight, cache.heads, block.projection.bias);
        if (block.attentionPostNorm) this.norm(branch, branch, block.attentionPostNorm, epsilon);
        if (!this.isParallel) add(x, branch);
        this.norm(normed, x, block.mlpNorm, epsilon);
        if (this.isParallel) add(x, branch);
        multiply(expansion, block.expansion.weight, normed, block.expansion.bias);
        this.activate(activation, expansion);
        multiply(branch, block.mlpProjection.weight, activation, block.mlpProjection.bias);
        if (block.mlpPostNorm) this.norm(branch, branch, block.mlpPostNorm, epsilon);
        add(x, branch);
        yield;
      }
      cache.ids[cache.start % cache.length] = id;
      cache.previous = id;
      cache.start++;
    }

    embed({ x, start, previous }, id) {
      const C = x.length;
      for (let i = 0; i < C; i++) x[i] = this.token[id * C + i];
      if (this.position) add(x, this.position.subarray(start * C, (start + 1) * C));
      if (this.config.embedding === "scaled") for (let i = 0; i < C; i++) x[i] *= Math.sqrt(C);
      if (this.bigram) {
        const row = this.bigramRow(previous, id);
        add(x, this.bigram.subarray(row * C, (row + 1) * C));
      }
    }

    // The row of a pair of tokens, a hash if there are more pairs than rows.
    bigramRow(previous, id) {
      const { document_token, bigram_rows } = this.config;
      const V = this.config.bigram_vocab ?? this.config.vocab_size;
      const count = Math.min(bigram_rows, V * V);
      const before = previous >= V || id === document_token ? 0 : previous;
      const pair = V * before + (id < V ? id : 0);
      if (count === V * V) return pair;
      const hash = Math.imul(pair % 2 ** 32, 0x9e3779b1) >>> 0;
      // floor(hash count / 2^32), in parts that are exact.
      const low = Math.floor(((hash & 0xffff) * count) / 65536);
      return Math.floor(((hash >>> 16) * count + low) / 65536);
    }

    // cache.normed -> cache.heads; keeps the keys and values of this token.
    attend(cache, block, layer, look) {
      const { n_head: H, n_kv_head: G, head_size: D, norm_epsilon: epsilon } = this.config;
      const { qkv, heads, start, length: S } = cache;
      multiply(qkv, block.qkv.weight, cache.normed, block.qkv.bias);
      const v = qkv.subarray((H + G) * D);
      if (layer === 0) cache.firstValues.set(v);
      if (block.valueResidual) mix(v, cache.firstValues, block.valueResidual);
      for (let h = 0; h < H + G; h++) {
        const head = qkv.subarray(h * D, (h + 1) * D);
        if (block.queryGain) {
          NORMS.rmsnorm(head, head, { weight: h < H ? block.queryGain : block.keyGain }, epsilon);
        }
        if (block.frequencies) this.rotate(head, start, block.frequencies);
      }
      const keys = cache.keys[layer], values = cache.values[layer];
      const place = (start % S) * G * D;
      keys.set(qkv.subarray(H * D, (H + G) * D), place);
      values.set(v, place);
      const first = Math.max(start + 1 - Math.min(S, block.window ?? S), cache.document, 0);
      const p = new Float64Array(start + 1 - first);
      heads.fill(0);
      for (let h = 0; h < H; h++) {
        const channel = Math.floor(h / (H / G)) * D; // of the keys and values that it shares
        for (let t = first; t <= start; t++) {
          const from = (t % S) * G * D + channel;
          let score = 0;
          for (let d = 0; d < D; d++) score += qkv[h * D + d] * keys[from + d];
          p[t - first] = score / Math.sqrt(this.config.score_divisor);
        }
        softmax(p);
        for (let t = first; t <= start; t++) {
          const from = (t % S) * G * D + channel, share = p[t - first];
          for (let d = 0; d < D; d++) heads[h * D + d] += share * values[from + d];
        }
        look?.(layer, h, first, p);
      }
    }

    // A head of a query or key -> the same, its first channels rotated by its position, in place.
    rotate(head, position, frequencies) {
      const half = frequencies.length;
      for (let i = 0; i < half; i++) {
        const angle = Math.fround(position * frequencies[i]); // as in kernels/reference.py
        const cosine = Math.cos(angle), sine = Math.sin(angle), a = head[i], b = head[half + i];
        head[i] = a * cosine - b * sine;
        head[half + i] = b * cosine + a * sine;
      }
    }

    // The residual stream -> logits (V), Float32Array.
    logits({ x, normed, logits }) {
      const cap = this.config.logit_softcap;
      this.norm(normed, x, this.finalNorm, this.config.norm_epsilon);
      multiply(logits, this.head, normed);
      if (cap) for (let i = 0; i < logits.length; i++) logits[i] = cap * Math.tanh(logits[i] / cap);
      return Float32Array.from(logits);
    }
  }

  // ------------------------------------------------------------------------------- tokenizers

  const UTF8 = new TextEncoder();
  // As Python's str.strip.
  const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
  const ENDS = new RegExp(`^${SPACE}|${SPACE}$`, "g");

  const byLength = (a, b) => [...b].length - [...a].length;
  const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");

  // Matches any of the names, the longest first; null if there is none.
  function anyOf(names) {
    if (!names.length) return null;
    return new RegExp([...names].sort(byLength).map(escaped).join("|"), "gu");
  }

  // Text -> what is between the names in it, and the number of each name: strings and numbers.
  function divided(text, numbers) {
    const pattern = anyOf([...numbers.keys()]);
    const parts = [];
    let start = 0;
    for (const found of pattern ? text.matchAll(pattern) : []) {
      parts.push(text.slice(start, found.index), numbers.get(found[0]));
      start = found.index + found[0].length;
    }
    parts.push(text.slice(start));
    return parts.filter((part) => part !== "");
  }

  // A tokenizer: `state` is what Tokenizer.state() says in Python. Subclasses have `pieces`, the
  // bytes of each token, and `words`, which encodes text without special tokens.
  class Tokenizer {
    constructor(state) {
      this.special = new Map(state.special); // pairs of name and id
      this.shown = new Set(state.shown); // names of those that belong to the text
    }

    // Text -> ids. With `special`, names of special tokens in it become these tokens.
    encode(text, special = true) {
      const ids = [];
      for (const part of special ? divided(text, this.special) : [text]) {
        if (typeof part === "number") ids.push(part);
        else this.words(part, ids);
      }
      return ids;
    }

    decode(ids) {
      const stream = this.stream();
      return ids.map((id) => stream.add(id)).join("") + stream.end();
    }

    // Turns tokens into text, of which each piece has whole characters only.
    stream() {
      const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
      return {
        add: (id) => decoder.decode(this.pieces[id] ?? new Uint8Array(), { stream: true }),
        end: () => decoder.decode(),
      };
    }
  }

  class CharTokenizer extends Tokenizer {
    constructor(state) {
      super(state);
      const pieces = [];
      for (const [name, i] of this.special) pieces[i] = name;
      this.numbers = new Map();
      let id = 0;
      for (const character of state.characters) {
        while (pieces[id] !== undefined) id++; // a special token
        this.numbers.set(character, id);
        pieces[id] = character;
      }
      this.pieces = pieces.map((text) => UTF8.encode(text));
    }

    words(text, ids) {
      for (const character of text) {
        const id = this.numbers.get(character);
        if (id === undefined) {
          throw new Error(
            `the model has never seen the character ${JSON.stringify(character)}: leave it out`,
          );
        }
        ids.push(id);
      }
    }
  }

  class ByteTokenizer extends Tokenizer {
    constructor(state) {
      super(state);
      const bytes = Array.from({ length: 256 }, (_, byte) => Uint8Array.of(byte));
      this.pieces = bytes.concat([...this.special.keys()].map((name) => UTF8.encode(name)));
    }

    words(text, ids) {
      for (const byte of UTF8.encode(text)) ids.push(byte);
    }
  }

  // Bytes as characters that can be seen, in their order: tokens 0 to 255 of our own tokenizers.
  const VISIBLE = [[0x21, 0x7e], [0xa1, 0xac], [0xae, 0xff]].flatMap(([first, last]) =>
    Array.from({ length: last - first + 1 }, (_, i) => first + i),
  );
  const BYTES = [...VISIBLE];
  for (let byte = 0; byte < 256; byte++) if (!VISIBLE.includes(byte)) BYTES.push(byte);
  const BYTE_OF = new Map(
    BYTES.map((byte, i) => {
      const code = i < VISIBLE.length ? byte : 0x100 + i - VISIBLE.length;
      return [String.fromCharCode(code), byte];
    }),
  );

  // How texts are split into words, the classes of characters by Unicode's version of our own:
  // "41-5a 61" are the code points of a class in hexadecimal.
  function wordPattern(split, classes) {
    const inside = (ranges) =>
      ranges
        .trim()
        .split(/\s+/)
        .map((range) => range.split("-").map((end) => `\\u{${end}}`).join("-"))
        .join("");
    const [L, N] = [inside(classes.letters), inside(classes.numbers)];
    const S = inside(`${classes.spaces} ${classes.newlines}`);
    const white = `[${S}]+(?![^${S}])|[${S}]+`;
    const gpt2 = `'(?:[stmd]|re|ve|ll)| ?[${L}]+| ?[${N}]+| ?[^${S}${L}${N}]+|${white}`;
    const gpt4 = (digits) =>
      `'(?:[sStTmMdD\\u017f]|[rRvV][eE]|[lL]{2})|[${N}]{1,${digits}}|[^\\n\\r${L}${N}]?[${L}]+|` +
      ` ?[^${S}${L}${N}]+[\\n\\r]*|[${S}]*[\\n\\r]+|${white}`;
    const patterns = {
      gpt2,
      "gpt2-digits": `[${N}]|[${S}]+(?=[${N}])|${gpt2}`,
      gpt4: gpt4(3),
      "gpt4-digits": gpt4(1),
    };
    return new RegExp(patterns[split], "gu");
  }

  class BPETokenizer extends Tokenizer {
    constructor(state, classes) {
      super(state);
      const merges = state.merges;
      const pieces = state.vocabulary
        ? state.vocabulary.map((token) => [...token].map((character) => BYTE_OF.get(character)))
        : BYTES.map((byte) => [byte]);
      if (!state.vocabulary) {
        for (let i = 0; i < merges.length; i += 2) {
          pieces.push(pieces[merges[i]].concat(pieces[merges[i + 1]]));
        }
      }
      this.whole = state.ignore_merges ?? false;
      this.numbers = new Map(); // bytes, as a string of them -> token
      pieces.forEach((bytes, id) => {
        if (bytes.length) this.numbers.set(String.fromCharCode(...bytes), id);
      });
      this.merges = new Map(); // a pair of tokens -> its place in the order, and what it becomes
      for (let i = 0; i < merges.length; i += 2) {
        const pair = this.pair(merges[i], merges[i + 1]);
        const bytes = pieces[merges[i]].concat(pieces[merges[i + 1]]);
        const made = this.numbers.get(String.fromCharCode(...bytes));
        if (!this.merges.has(pair)) this.merges.set(pair, { order: i / 2, made });
      }
      this.pieces = pieces.map((bytes) => Uint8Array.from(bytes));
      for (const [name, id] of this.special) this.pieces[id] = UTF8.encode(name);
      this.pattern = wordPattern(state.split, classes);
      // Special tokens that are looked for before and after letters and accents are joined.
      const late = new Set(state.late ?? []);
      this.joined = (text) => (state.normalizer === "NFC" ? text.normalize("NFC") : text);
      this.early = new Map([...this.special].filter(([name]) => !late.has(name)));
      const others = [...this.special].filter(([name]) => late.has(name));
      this.late = new Map(others.map(([name, id]) => [this.joined(name), id]));
    }

    pair(left, right) {
      return left * 2 ** 20 + right; // there are at most 2^20 tokens
    }

    encode(text, special = true) {
      const ids = [];
      for (const part of special ? divided(text, this.early) : [text]) {
        if (typeof part === "number") ids.push(part);
        else {
          const text = this.joined(part);
          for (const piece of special ? divided(text, this.late) : [text]) {
            if (typeof piece === "number") ids.push(piece);
            else this.words(piece, ids);
          }
        }
      }
      return ids;
    }

    words(text, ids) {
      for (const [word] of text.matchAll(this.pattern)) {
        const letters = Array.from(UTF8.encode(word), (byte) => String.fromCharCode(byte));
        const known = this.whole ? this.numbers.get(letters.join("")) : undefined;
        if (known !== undefined) ids.push(known);
        else {
          const tokens = letters.map((letter) => this.numbers.get(letter));
          if (tokens.includes(undefined)) {
            throw new Error(
              `the tokenizer has no token for a character of ${JSON.stringify(word)}: leave it out`,
            );
          }
          for (const id of this.merged(tokens)) ids.push(id);
        }
      }
    }

    // The tokens of a word's bytes -> those after all merges: what comes first in their order is
    // merged first, the leftmost before others. Waiting merges are in a heap.
    merged(tokens) {
      const n = tokens.length;
      const before = Int32Array.from(tokens, (_, i) => i - 1);
      const after = Int32Array.from(tokens, (_, i) => (i + 1 < n ? i + 1 : -1));
      const heap = [];
      const wait = (place) => {
        const next = after[place];
        const merge = next < 0 ? undefined : this.merges.get(this.pair(tokens[place], tokens[next]));
        if (merge) {
          push(heap, { key: merge.order * 2 ** 32 + place, place, ...merge, left: tokens[place],
            right: tokens[next] });
        }
      };
      for (let i = 0; i < n; i++) wait(i);
      while (heap.length) {
        const { place, left, right, made } = pop(heap);
        const next = after[place];
        if (tokens[place] !== left || next < 0 || tokens[next] !== right) continue;
        tokens[place] = made;
        tokens[next] = -1; // gone
        after[place] = after[next];
        if (after[place] >= 0) before[after[place]] = place;
        wait(place);
        if (before[place] >= 0) wait(before[place]);
      }
      return tokens.filter((token) => token >= 0);
    }
  }

  // A heap of entries, the one with the smallest key first.
  function push(heap, entry) {
    let i = heap.push(entry) - 1;
    for (; i > 0 && entry.key < heap[(i - 1) >> 1].key; i = (i - 1) >> 1) {
      heap[i] = heap[(i - 1) >> 1];
    }
    heap[i] = entry;
  }

  function pop(heap) {
    const first = heap[0], entry = heap.pop();
    let i = 0;
    if (!heap.length) return first;
    for (let child = 1; child < heap.length; child = 2 * i + 1) {
      if (child + 1 < heap.length && heap[child + 1].key < heap[child].key) child++;
      if (entry.key <= heap[child].key) break;
      heap[i] = heap[child];
      i = child;
    }
    heap[i] = entry;
    return first;
  }

  const TOKENIZERS = { char: CharTokenizer, byte: ByteTokenizer, bpe: BPETokenizer };

  // --------------------------------------------------------------------------- conversations

  // A chat template that is data: what stands before and after the text of each role.
  class Template {
    constructor(fields) {
      Object.assign(this, fields);
    }

    // Messages {role, content} -> ids up to where the assistant begins to answer.
    prompt(tokenizer, messages) {
      const turns = [...messages];
      if (this.system && turns[0]?.role !== "system") {
        turns.unshift({ role: "system", content: this.system });
      }
      // Some put the system's text before the first turn's.
      const isJoined = this.joins && turns[0]?.role === "system";
      let instruction = isJoined ? turns.shift().content + this.joins : "";
      const said = []; // where the texts of turns begin and end
      let written = this.begin;
      for (const { role, content } of turns) {
        let text = instruction + (this.strips ? content.replace(ENDS, "") : content);
        instruction = "";
        if (role === "assistant" && !text.startsWith(this.lead)) text = this.lead + text;
        written += this.before[role];
        said.push([written.length, written.length + text.length]);
        written += text + this.after[role];
      }
      written += this.before.assistant;
      const ids = [];
      let place = 0;
      for (const [begin, name] of specialTokens(tokenizer, written, said)) {
        ids.push(...tokenizer.encode(written.slice(place, begin), false));
        ids.push(tokenizer.special.get(name));
        place = begin + name.length;
      }
      return [...ids, ...tokenizer.encode(written.slice(place), false)];
    }
  }

  // Where special tokens begin in what a template has written, and their names, as in
  // smallmind/text/chat.py: a name that is said is none, unless the token belongs to the text.
  function* specialTokens(tokenizer, written, said) {
    const every = anyOf([...tokenizer.special.keys()]);
    const belonging = tokenizer.shown.size
      ? new RegExp(anyOf([...tokenizer.shown]).source, "uy")
      : null;
    let place = 0;
    let turn = 0;
    for (;;) {
      if (every) every.lastIndex = place;
      let found = every?.exec(written);
      if (!found) return;
      const begin = found.index;
      while (turn < said.length && said[turn][1] <= begin) turn++;
      const isSaid = turn < said.length && said[turn][0] < begin + found[0].length;
      place = begin + 1;
      if (isSaid && !tokenizer.shown.has(found[0])) {
        if (belonging) belonging.lastIndex = begin;
        found = belonging?.exec(written);
      }
      if (found) {
        yield [begin, found[0]];
        place = begin + found[0].length;
      }
    }
  }

  // --------------------------------------------------------------------------------- sampling

  const WORD = 2n ** 64n - 1n;

  // Integers -> one 64-bit hash of them all, as in smallmind/randomness.py.
  function hash64(...words) {
    let x = 0n;
    for (const word of words) {
      x = (x + BigInt(word) + 0x9e3779b97f4a7c15n) & WORD;
      x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & WORD;
      x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & WORD;
      x ^= x >> 31n;
    }
    return x;
  }

  const round = Math.fround;

  // Logits (V) -> the token that a draw in [0, 1) chooses, as in smallmind/sampling.py and in its
  // types of numbers. `counts`: token -> how often it was written, 0 for those of the prompt alone.
  function choose(logits, settings, uniform, counts) {
    const { temperature = 0.8 } = settings;
    if (!logits.every(Number.isFinite)) {
      throw new Error("the model's logits are not finite: its weights are too large or damaged");
    }
    const x = penalised(logits, settings, counts);
    let best = 0;
    for (let i = 0; i < x.length; i++) if (x[i] > x[best]) best = i;
    if (temperature === 0) return best;
    const divisor = round(Math.max(temperature, 1e-30));
    const p = x.map((value) => Math.exp(round(round(value - x[best]) / divisor)));
    let tokens = Array.from(p, (_, i) => i);
    if (settings.top_k != null) tokens = largest(tokens, p, settings.top_k);
    if (settings.top_p != null) tokens = nucleus(tokens, p, settings.top_p);
    if (settings.min_p != null) tokens = tokens.filter((i) => p[i] >= round(settings.min_p));
    const total = tokens.reduce((sum, i) => sum + p[i], 0);
    let sum = 0;
    return tokens.find((i) => (sum += p[i]) > uniform * total) ?? tokens[tokens.length - 1];
  }

  function penalised(logits, settings, counts) {
    const { repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0 } = settings;
    const x = logits.slice();
    for (const [token, count] of counts) {
      if (repetition_penalty !== 1) {
        x[token] *= x[token] > 0 ? 1 / repetition_penalty : repetition_penalty;
      }
      if (count) x[token] -= presence_penalty;
      if (count) x[token] -= frequency_penalty * count;
    }
    return x;
  }

  // Tokens, p of each -> those that stay, in their order.
  function largest(tokens, p, count) {
    const order = [...tokens].sort((a, b) => p[b] - p[a]); // stable: of equal ones the first
    return order.slice(0, count).sort((a, b) => a - b);
  }

  function nucleus(tokens, p, share) {
    const order = [...tokens].sort((a, b) => p[b] - p[a]);
    const least = share * order.reduce((sum, i) => sum + p[i], 0);
    let sum = 0;
    const last = order.findIndex((i) => (sum += p[i]) >= least);
    return order.slice(0, last < 0 ? order.length : last + 1).sort((a, b) => a - b);
  }

  // Logits (V), the token that was chosen -> its logprob, the entropy of the choice, and
  // the likeliest tokens with theirs, in nats.
  function facts(logits, token, top) {
    let most = -Infinity, sum = 0;
    for (const value of logits) most = Math.max(most, value);
    for (const value of logits) sum += Math.exp(value - most);
    const logsum = most + Math.log(sum);
    let entropy = 0;
    for (const value of logits) entropy -= Math.exp(value - logsum) * (value - logsum);
    const likeliest = []; // ids, in order; of equal ones the first before others
    for (let id = 0; id < logits.length && top > 0; id++) {
      if (likeliest.length === top && !(logits[id] > logits[likeliest[top - 1]])) continue;
      let i = likeliest.length === top ? top - 1 : likeliest.length;
      for (; i > 0 && logits[id] > logits[likeliest[i - 1]]; i--) likeliest[i] = likeliest[i - 1];
      likeliest[i] = id;
    }
    return {
      logprob: logits[token] - logsum,
      entropy,
      top: likeliest.map((id) => ({ id, logprob: logits[id] - logsum })),
    };
  }

  // ---------------------------------------------------------------------------------- writing

  // A text that is being written, of which only what certainly belongs to it is handed out.
  class Text {
    constructor(tokenizer, ends, stops) {
      this.ended = null; // by "stop" or at the "end" of a text
      this.stream = tokenizer.stream();
      this.ends = ends;
      this.stops = stops;
      this.held = ""; // may be the beginning of a stop string
    }

    // The next token -> what the text goes on with.
    add(token) {
      if (this.ends.has(token)) {
        this.ended = "end";
        return "";
      }
      this.held += this.stream.add(token);
      const places = this.stops.map((stop) => this.held.indexOf(stop)).filter((i) => i >= 0);
      if (places.length) {
        this.ended = "stop";
        this.held = this.held.slice(0, Math.min(...places));
        return "";
      }
      const keep = Math.max(0, ...this.stops.map((stop) => overlap(this.held, stop)));
      const piece = this.held.slice(0, this.held.length - keep);
      this.held = this.held.slice(piece.length);
      return piece;
    }

    end() {
      return this.held + (this.ended === "stop" ? "" : this.stream.end());
    }
  }

  // The length of the longest end of a text that is a beginning of `stop`.
  function overlap(text, stop) {
    let n = Math.min(text.length, stop.length - 1);
    while (n > 0 && !text.endsWith(stop.slice(0, n))) n--;
    return n;
  }

  // A task for the browser's queue: what else waits, such as a click, has its turn before it.
  const pause = () =>
    new Promise((resume) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => {
        port1.close();
        resume();
      };
      port2.postMessage(null);
    });

  let sliceBegan = 0;

  // Runs a generator to its end -> what it returns, in slices between which the page has its turn.
  async function inSlices(generator, signal) {
    for (;;) {
      const { done, value } = generator.next();
      if (performance.now() - sliceBegan > SLICE) {
        await pause();
        sliceBegan = performance.now();
      }
      signal?.throwIfAborted();
      if (done) return value;
    }
  }

  // A model with its tokenizer. `about`: what `smallmind export --to html` says of both.
  class Program {
    constructor(about, base64) {
      const bytes = bytesOf(base64);
      const tensors = new Map();
      let place = 0;
      for (const { name, type, size } of about.tensors) {
        tensors.set(name, READERS[type](bytes.slice(place, (place += size))));
      }
      if (place !== bytes.length) throw new Error("the file is damaged: it has other weights");
      this.about = about;
      this.model = new Model(about.config, tensors);
      this.tokenizer = new TOKENIZERS[about.tokenizer.kind](about.tokenizer, about.classes);
      this.template = about.template ? new Template(about.template) : null;
      this.ends = new Set(about.ends);
      this.V = about.vocab_size; // the model may have more rows than the tokenizer has tokens
    }

    // The ids of a text that is to be continued: after the tokens that begin texts, once.
    prompt(text) {
      const ids = this.tokenizer.encode(text);
      const first = this.about.beginning;
      return first.every((id, i) => id === ids[i]) ? ids : [...first, ...ids];
    }

    // Writes after ids, token by token: yields {id, piece, logprob, entropy, top}, and at last
    // {piece, ended} with the rest of the text and why it ended. settings: those of
    // GenerationConfig; `top`, the number of likeliest tokens to tell of, if any; `begun`, the ids
    // with which the text has begun, which are not repeated.
    async *write(ids, settings = {}, signal = null) {
      const { max_tokens = 500, seed = 1337, stop = [], top, begun = [] } = settings;
      if (!ids.length) throw new Error("the prompt is empty; give at least one character");
      const text = new Text(this.tokenizer, this.ends, typeof stop === "string" ? [stop] : stop);
      const counts = new Map(ids.map((id) => [id, 0]));
      for (const id of begun) {
        counts.set(id, (counts.get(id) ?? 0) + 1);
        text.stream.add(id);
      }
      let next = [...ids, ...begun];
      const cache = this.model.cache(next.length + max_tokens);
      next = next.slice(-cache.length);
      for (let i = begun.length; i < begun.length + max_tokens && !text.ended; i++) {
        const all = await inSlices(this.model.decode(cache, next), signal);
        const logits = all.subarray(0, this.V);
        // Token i of a seed depends on these two, not on earlier draws.
        const uniform = Number(hash64(seed, i) >> 11n) / 2 ** 53;
        const id = choose(logits, settings, uniform, counts);
        counts.set(id, (counts.get(id) ?? 0) + 1);
        next = [id];
        const seen = top === undefined ? {} : facts(logits, id, top);
        yield { id, piece: text.add(id), ...seen };
      }
      yield { piece: text.end(), ended: text.ended ?? "length" };
    }

    // The ids of a text -> for each token the logprob, the entropy and the likeliest others of the
    // choice that made it; nulls for the first.
    async inspect(ids, top = 10, signal = null) {
      this.check(ids);
      const cache = this.model.cache(ids.length);
      const tokens = [{ id: ids[0], logprob: null, entropy: null, top: [] }];
      for (let t = 0; t + 1 < ids.length; t++) {
        const all = await inSlices(this.model.decode(cache, [ids[t]]), signal);
        tokens.push({ id: ids[t + 1], ...facts(all.subarray(0, this.V), ids[t + 1], top) });
      }
      return tokens;
    }

    // The ids of a text -> for each token the probabilities (t + 1) with which a head looks at it
    // and those before.
    async attention(ids, layer, head, signal = null) {
      this.check(ids);
      const { n_layer, n_head } = this.model.config;
      if (!(layer in this.model.blocks) || !(head >= 0 && head < n_head)) {
        throw new Error(`the model has ${n_layer} layers of ${n_head} heads, counted from 0`);
      }
      const cache = this.model.cache(ids.length);
      const rows = [];
      const look = (l, h, first, p) => {
        if (l === layer && h === head) rows.push([...Array(first).fill(0), ...p]);
      };
      for (const id of ids) await inSlices(this.model.step(cache, id, look), signal);
      return rows;
    }

    check(ids) {
      const { block_size } = this.model.config;
      if (ids.length < 1 || ids.length > block_size) {
        throw new Error(
          `the text has ${ids.length} tokens, and the model sees from 1 to ${block_size}`,
        );
      }
      if (!ids.every((id) => Number.isInteger(id) && id >= 0 && id < this.V)) {
        throw new Error(`a token is outside the vocabulary of ${this.V}`);
      }
    }
  }

  return { Program, Cache, hash64, choose, wordPattern };
})();
