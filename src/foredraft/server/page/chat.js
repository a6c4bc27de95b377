// The chat, and the figures beside it. What people and the model say is inserted as text only.
import { Plot, SECONDS, short } from "/page/plots.js";

const $ = (id) => document.getElementById(id);
const state = { model: null, turns: [], before: null, asking: null, samples: [] };

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
}
theme(sessionStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => sessionStorage.getItem("theme") ?? theme(dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  sessionStorage.setItem("theme", next);
  theme(next);
});

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("input", () => sessionStorage.setItem("key", $("key").value));
function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function turn(who, text) {
  const made = element("div", "turn");
  const said = element("span", "said", text);
  made.append(element("span", "who", who), said);
  $("log").append(made);
  $("log").scrollTop = $("log").scrollHeight;
  return { made, said };
}

function request() {
  const plain = $("drafter").value === "plain";
  const body = {
    model: state.model, messages: state.turns, stream: true, return_token_origins: true,
    stream_options: { include_usage: true }, temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    speculation: plain ? { enabled: false } : { num_speculative_tokens: Number($("length").value) },
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

async function read(response, said) {
  const found = { text: "", tokens: 0, metrics: null, first: 0, last: 0 };
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    found.metrics = event.metrics ?? found.metrics;
    const choice = event.choices[0];
    found.text += choice?.delta?.content ?? "";
    for (const token of choice?.tokens ?? []) {
      const shown = element("span", "token", token.text);
      shown.dataset.origin = token.origin;
      shown.title = token.origin;
      said.append(shown);
      found.last = performance.now();
      found.first ||= found.last;
      found.tokens += 1;
    }
    $("log").scrollTop = $("log").scrollHeight;
  }
  return found;
}

function figures(found) {
  const parts = [`${found.tokens} tokens`];
  const seconds = (found.last - found.first) / 1000;
  if (seconds > 0) parts.push(`${short((found.tokens - 1) / seconds)} tokens/s`);
  const metrics = found.metrics?.speculative_decoding;
  if (metrics?.num_spec_steps) parts.push(`acceptance length ${short(metrics.mean_acceptance_length)}`);
  if (state.before !== null) {
    parts.push(found.text === state.before ? "the same text as before" : "another text than before");
  }
  return parts.join(", ");
}

function busy(on) {
  $("send").disabled = on || state.model === null;
  $("again").disabled = on || state.turns.length < 1;
  $("stop").disabled = !on;
  $("clear").disabled = on;
  $("log").setAttribute("aria-busy", String(on)); // announced once it is whole
}

async function answer() {
  state.asking = new AbortController();
  busy(true);
  $("status").textContent = "Answering";
  const { made, said } = turn("Model");
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: state.asking.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const found = await read(response, said);
    made.append(element("span", "figures", figures(found)));
    state.turns.push({ role: "assistant", content: found.text });
    $("status").textContent = "Answered";
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (stopped && said.textContent) state.turns.push({ role: "assistant", content: said.textContent });
    $("status").textContent = stopped ? "Stopped" : `Failed: ${error.message}`;
  }
  state.asking = null;
  busy(false);
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || state.asking || state.model === null) return;
  $("prompt").value = "";
  state.before = null;
  state.turns.push({ role: "user", content: text });
  turn("You", text);
  answer();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("again").addEventListener("click", () => {
  state.before = null;
  if (state.turns.at(-1)?.role === "assistant") state.before = state.turns.pop().content;
  answer();
});
$("stop").addEventListener("click", () => state.asking?.abort());
$("clear").addEventListener("click", () => {
  state.turns = [];
  $("log").replaceChildren();
  $("status").textContent = "";
  busy(false);
  $("prompt").focus();
});

const plots = {
  speed: new Plot($("plots"), "Tokens", "tokens/s"),
  length: new Plot($("plots"), "Acceptance length", "tokens a step"),
  positions: new Plot($("plots"), "Acceptance by position", "share"),
  width: new Plot($("plots"), "Draft width chosen", "tokens"),
  batch: new Plot($("plots"), "Batch (dashed: waits)", "requests"),
  pages: new Plot($("plots"), "Pages used", "pages"),
};

const WHY = {
  fixed: "The length is fixed: each request is drafted for as far as it was configured.",
  "batch size": "The length goes by the number of requests, as configured.",
  pays: "Drafts promise more tokens a second than plain decoding, so they were asked for.",
  loses: "Drafts promise no more than plain decoding here, so none was asked for.",
  probe: "A short draft, to learn whether drafts would be accepted now.",
  sample: "A plain step now and then, to learn what one costs.",
  disabled: "There is no drafter in force: plain decoding.",
};

function explain(step) {
  if (!step) return;
  const total = (name) => step.requests.reduce((sum, each) => sum + each[name], 0);
  $("why").textContent = WHY[step.reason] ?? step.reason;
  const limits = [...new Set(step.requests.map((each) => each.limit).filter(Boolean))];
  const ms = (seconds) => `${(seconds * 1000).toFixed(1)} ms`;
  const facts = [
    ["Reason", step.reason],
    ["Requests", `${step.num_requests}, with ${step.num_positions} cached positions`],
    ["Draft tokens", `${total("asked")} asked for, ${total("drafted")} verified, ${total("accepted")} accepted`],
    ["Left less by", limits.join(", ") || "nothing"],
    ["Took", `${ms(step.seconds)}, and ${ms(step.drafter_seconds)} to draft`],
    ["A plain step", step.plain_seconds === null ? "not known yet" : ms(step.plain_seconds)],
  ];
  $("facts").replaceChildren(...facts.flatMap(([k, v]) => [element("dt", "", k), element("dd", "", v)]));
}

function rates(old, now) {
  const added = (name) => now.counts[name] - old.counts[name];
  const per = (a, b) => (added(b) ? added(a) / added(b) : null);
  return {
    at: now.seconds, speed: added("generated_tokens") / (now.seconds - old.seconds),
    length: per("draft_emitted_tokens", "drafts"), width: per("chosen_tokens", "choices"),
    running: now.running, waiting: now.waiting, pages: now.pages.used,
  };
}

function draw(now) {
  const line = (name) => state.samples.map((each) => [now.seconds - each.at, each[name]]);
  const last = state.samples.at(-1);
  const told = (value, unit) => (value === null ? "no drafts now" : `${short(value)} ${unit}`);
  plots.speed.lines([line("speed")], told(last.speed, "tokens/s"));
  plots.length.lines([line("length")], told(last.length, "tokens a step"));
  plots.width.lines([line("width")], told(last.width, "tokens"));
  plots.batch.lines([line("running"), line("waiting")], `${last.running} run, ${last.waiting} wait`);
  const { used, cached, free } = now.pages;
  plots.pages.lines([line("pages")], `${used} of ${used + cached + free}, ${cached} cached`);
  const { reached_per_position: reached, accepted_per_position: accepted } = now.counts;
  const shares = accepted.map((each, i) => (reached[i] ? each / reached[i] : 0));
  plots.positions.bars(shares, shares.length ? `${short(shares[0])} at 1` : "no drafts yet");
}

function settle(now) {
  const drafts = now.method !== null;
  if (drafts !== ($("drafter").options.length > 1)) {
    $("drafter").replaceChildren();
    if (drafts) $("drafter").add(new Option(now.method, "drafter"));
    $("drafter").add(new Option("plain decoding", "plain"));
    $("length").max = $("length").value = Math.max(1, now.num_speculative_tokens);
  }
  const policy = drafts ? `${now.method}, ${now.policy} policy` : "plain decoding";
  $("served").textContent = `${now.models[0]}: ${policy}`;
  if (state.model === null) { state.model = now.models[0]; busy(state.asking !== null); }
}

let old = null;
async function look() {
  try {
    if (!document.hidden) {
      const response = await fetch("/live", { headers: headers() });
      if (!response.ok) throw new Error(response.status === 401 ? "an API key is needed" : `status ${response.status}`);
      const now = await response.json();
      settle(now);
      if (old !== null && now.seconds > old.seconds) state.samples.push(rates(old, now));
      state.samples = state.samples.filter((each) => now.seconds - each.at <= SECONDS);
      if (state.samples.length) draw(now);
      explain(now.last_step);
      old = now;
    }
  } catch (error) {
    $("served").textContent = `no figures: ${error.message}`;
  }
  setTimeout(look, 1000);
}
busy(false);
look();
