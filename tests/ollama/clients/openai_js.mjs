// openai-node: the `openai` package of npm, pointed at /v1.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { check, hi, rejects, say, url, weather } from './checks.mjs';

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'any', maxRetries: 0 });
const tools = [{ type: 'function', function: weather }];

await check('lists models', async () => {
  const ids = [];
  for await (const model of openai.models.list()) ids.push(model.id);
  assert(ids.includes('tinychat:latest'));
});

await check('chats and streams', async () => {
  const whole = await openai.chat.completions.create({ model: 'tinychat', messages: hi });
  assert.equal(whole.choices[0].message.content, 'Hello!');
  const stream = openai.chat.completions.stream({ model: 'tinychat', messages: hi });
  assert.equal((await stream.finalMessage()).content, 'Hello!');
});

await check('streams tool calls', async () => {
  const stream = openai.chat.completions.stream({ model: 'tinythink', messages: say('TOOL'), tools });
  const { tool_calls: calls } = await stream.finalMessage();
  assert.deepEqual(JSON.parse(calls[0].function.arguments), { city: 'Paris' });
});

await check('runs tools by itself', async () => {
  const run = openai.chat.completions.runTools({
    model: 'tinythink',
    messages: say('TOOL'),
    tools: [{ type: 'function', function: { ...weather, parse: JSON.parse, function: ({ city }) => `rain in ${city}` } }],
  });
  assert.equal(await run.finalContent(), 'Hello!');
});

await check('gives responses', async () => {
  assert.equal((await openai.responses.create({ model: 'tinythink', input: 'hi' })).output_text, 'Hello!');
  const stream = openai.responses.stream({ model: 'tinythink', input: 'hi' });
  assert.equal((await stream.finalResponse()).output_text, 'Hello!');
});

await check('throws errors', async () => {
  const error = await rejects(() => openai.chat.completions.create({ model: 'nosuch', messages: hi }));
  assert.equal(error.status, 404);
  const middle = await openai.chat.completions.create({ model: 'tiny', messages: say('ERRMID'), stream: true });
  await rejects(async () => { for await (const _ of middle); });
});
