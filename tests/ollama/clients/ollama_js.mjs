// ollama-js: the `ollama` package of npm.

import assert from 'node:assert/strict';
import { Ollama } from 'ollama';
import { check, hi, rejects, say, url, weather } from './checks.mjs';

const ollama = new Ollama({ host: url });
const tools = [{ type: 'function', function: weather }];

await check('lists and describes', async () => {
  const { models } = await ollama.list();
  assert(models.some((model) => model.name === 'tinythink:latest' && model.modified_at));
  const shown = await ollama.show({ model: 'tinythink' });
  assert(shown.capabilities.includes('thinking') && shown.model_info['general.architecture']);
  await ollama.ps();
  assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+/);
});

await check('chats', async () => {
  const reply = await ollama.chat({ model: 'tinychat', messages: hi });
  assert.equal(reply.message.content, 'Hello!');
});

await check('streams text of any kind', async () => {
  const text = 'a\u2028b\u2029c\u0085d \u{1F600} 漢字';
  let got = '';
  for await (const part of await ollama.chat({ model: 'tinychat', messages: say(`SAY ${text}`), stream: true })) {
    got += part.message.content;
  }
  assert.equal(got, text);
});

await check('calls tools', async () => {
  const reply = await ollama.chat({ model: 'tinythink', messages: say('TOOL'), tools });
  assert.deepEqual(reply.message.tool_calls[0].function.arguments, { city: 'Paris' });
  const history = [...say('TOOL'), reply.message, { role: 'tool', tool_name: 'get_weather', content: 'rain' }];
  assert.equal((await ollama.chat({ model: 'tinythink', messages: history, tools })).message.content, 'Hello!');
});

await check('aborts, and the next request is answered at once', async () => {
  const stream = await ollama.chat({ model: 'tiny', messages: say('SLOW'), stream: true });
  let count = 0;
  const error = await rejects(async () => {
    for await (const _ of stream) {
      if (++count === 3) stream.abort();
    }
  });
  assert.equal(error.name, 'AbortError');
  const began = Date.now();
  await ollama.chat({ model: 'tiny', messages: hi });
  assert(Date.now() - began < 1000);
});

await check('embeds', async () => {
  const { embeddings } = await ollama.embed({ model: 'tinychat', input: ['a', 'b'] });
  assert.equal(embeddings.length, 2);
});

await check('throws errors', async () => {
  assert.equal((await rejects(() => ollama.chat({ model: 'nosuch', messages: hi }))).status_code, 404);
  const middle = await ollama.generate({ model: 'tiny', prompt: 'ERRMID', stream: true });
  assert.match((await rejects(async () => { for await (const _ of middle); })).message, /scripted engine fails/);
});
