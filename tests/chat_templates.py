"""Chat templates of our own with the structure of well-known ones, and a tokenizer of one token per byte for each."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A start-of-text token, a blank line behind the header, contents trimmed, tools in the system turn, results from
# `ipython`.
LLAMA3 = """\
{{- '<|begin|>' }}
{%- if tools %}{{- '<|header|>system<|/header|>\n\nYou may call:' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|header|>' + role + '<|/header|>\n\n' }}
{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' + '<|eom|>' }}
{%- else %}{{- (m.content | trim) + '<|eot|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\n\n' }}{%- endif %}"""

# Thinking of the last answers alone is written; without it an empty block; `enable_thinking` false puts that block
# into the prompt.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set found = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set found.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{%- set content = m.content %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > found.query and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name
  + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""

# The prompt opens the thinking; past answers keep what stands behind it.
OPENS_THINKING = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>' + m.content }}
{%- else %}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""

# No system role: its text stands before the first question. Tools stand before the last one. No header for answers.
MISTRAL = """\
{{- '<s>' }}
{%- set start = 1 if messages[0].role == 'system' else 0 %}
{%- set found = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set found.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages[start:] %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 + start == found.last %}{{- '[TOOLS] ' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
{{- '[INST] ' + (messages[0].content + '\n\n' if start and loop.first else '') + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{- '[RESULTS] ' + m.content + '[/RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[CALLS] ' + m.tool_calls[0].function.name + ' ' + (m.tool_calls[0].function.arguments | tojson) + '</s>' }}
{%- elif m.role == 'assistant' %}{{- ' ' + (m.content | trim) + '</s>' }}
{%- else %}{{- raise_exception('a system message has to be the first') }}{%- endif %}
{%- endfor %}"""

# The assistant is called model, user and model take turns, a system message is refused, and another token than eos
# ends a turn.
GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{- raise_exception('no role ' + m.role) }}{%- endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('user and model take turns') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n'
  + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

# What ends an answer takes the blanks behind it (`rstrip`), and the whole conversation ends with one more special
# token.
PHI3 = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"""

SPECIALS = {
    CHATML: ["<|im_start|>", "<|im_end|>"],
    LLAMA3: ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|eom|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    OPENS_THINKING: ["<|user|>", "<|assistant|>", "<|end|>"],
    MISTRAL: ["<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]"],
    GEMMA: ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    PHI3: ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
}
NAMES = dict(zip(SPECIALS, ("chatml", "llama3", "qwen3", "opens-thinking", "mistral", "gemma", "phi3"), strict=True))


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of one of the templates above. `<think>` and its like are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, rstrip=template == PHI3) for token in SPECIALS[template]]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIALS[template][1])
    tokenizer.chat_template = template
    return tokenizer
