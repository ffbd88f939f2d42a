// Talks to the server with OpenAI's official client and prints one JSON object with everything it saw.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const seen = {};

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return {
      class: error.constructor.name,
      status: error.status,
      code: error.code,
      param: error.param,
      type: error.type,
      hasRequestId: Boolean(error.requestID),
    };
  }
}

async function collected(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const chat = { model, messages, temperature: 0 };
const { data, response } = await client.chat.completions.create(chat).withResponse();
seen.whole = data;
seen.worker = response.headers.get("x-prefixcache-worker");
seen.chunks = await collected(
  await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
);
seen.accumulated = await client.chat.completions.stream({ ...chat, n: 2, logprobs: true }).finalChatCompletion();
seen.choices = await client.chat.completions.create({ ...chat, n: 2, logprobs: true, top_logprobs: 2 });
seen.completion = await client.completions.create({ model, prompt: [5, 6, 7, 8], max_tokens: 4, temperature: 0 });
seen.completionChunks = await collected(
  await client.completions.create({ model, prompt: [5, 6, 7, 8], max_tokens: 4, temperature: 0, stream: true }),
);
seen.models = (await collected(await client.models.list())).map((found) => found.id);

seen.notFound = await failure(client.chat.completions.create({ ...chat, model: "no-such-model" }));
seen.badRequest = await failure(client.chat.completions.create({ ...chat, max_tokens: -1, stream: true }));
seen.tooLong = await failure(client.chat.completions.create({ ...chat, max_tokens: 100000 }));
seen.wrongPath = await failure(client.embeddings.create({ model, input: "hello" }));

const long = await client.chat.completions.create({ ...chat, max_tokens: 450, ignore_eos: true, stream: true });
seen.readBeforeAbort = 0;
for await (const chunk of long) {
  if (chunk.choices[0].delta.content && ++seen.readBeforeAbort === 3) long.controller.abort();
}
seen.timeout = await failure(
  client.chat.completions.create({ ...chat, max_tokens: 450, ignore_eos: true }, { timeout: 100 }),
);

console.log(JSON.stringify(seen));
