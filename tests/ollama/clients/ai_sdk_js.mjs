// Vercel's AI SDK, by its Ollama provider and by its OpenAI-compatible one.

import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embed, generateText, jsonSchema, streamText, tool } from 'ai';
import { createOllama } from 'ollama-ai-provider-v2';
import { check, url, weather } from './checks.mjs';

const ollama = createOllama({ baseURL: `${url}/api` });
const compatible = createOpenAICompatible({ name: 'slotpy', baseURL: `${url}/v1`, includeUsage: true });
const tools = { get_weather: tool({ description: 'w', inputSchema: jsonSchema(weather.parameters) }) };

for (const [name, provider] of [['ollama', ollama], ['compatible', compatible]]) {
  await check(`${name}: generates and streams`, async () => {
    assert.equal((await generateText({ model: provider('tinychat'), prompt: 'hi' })).text, 'Hello!');
    const stream = streamText({ model: provider('tinychat'), prompt: 'hi' });
    let text = '';
    for await (const part of stream.textStream) text += part;
    assert.equal(text, 'Hello!');
    assert((await stream.usage).outputTokens > 0);
  });

  await check(`${name}: calls tools`, async () => {
    const { toolCalls } = await generateText({ model: provider('tinythink'), prompt: 'TOOL', tools });
    assert.deepEqual(toolCalls[0].input, { city: 'Paris' });
  });
}

await check('ollama: embeds', async () => {
  const { embedding } = await embed({ model: ollama.embedding('tinychat'), value: 'a' });
  assert(embedding.length > 1);
});
