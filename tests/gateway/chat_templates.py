"""Chat templates in the manner of published ones, for tests."""

CHATML = """\
{%- if tools %}
<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' }}You may call functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Write a call as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>.<|im_end|>
{%- elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
{%- if message.role == 'assistant' %}

<|im_start|>assistant
{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}
{%- elif message.role == 'tool' %}

<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- else %}

<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}

<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>
{% endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- ns.system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- (message.content | tojson if message.content is mapping else message.content) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
    {%- if loop.first and tools is not none %}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Ids of calls have 9 letters and digits!") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception("Only user, assistant and tool roles are supported!") }}
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

BY_NAME = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}


def _formatted(call: str, *, before: str = "", after: str = "", between: str = "", opens: str = "") -> str:
    """Return a template that writes calls in a given form, with `name` and `arguments` of each."""
    return (
        "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}"
        "{%- for message in messages %}<|{{ message.role }}|>"
        "{%- if message.tool_calls %}{{ message.content or '' }}" + before + "{%- for call in message.tool_calls %}"
        "{%- set name = call.function.name %}{%- set arguments = call.function.arguments %}"
        + call
        + "{%- if not loop.last"
        " %}"
        + between
        + "{%- endif %}{%- endfor %}"
        + after
        + "{%- else %}{{ message.content }}{%- endif %}<|end|>{%- endfor"
        " %}{%- if add_generation_prompt %}<|assistant|>" + opens + "{%- endif %}"
    )


MISTRAL_ARGS = _formatted("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments | tojson }}")
QWEN3_CODER = _formatted(
    "<tool_call>\n<function={{ name }}>\n{%- for key, value in arguments | items %}"
    "{{ '\\n<parameter=' + key + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>' }}"
    "{%- endfor %}{{ '\\n</function>\\n</tool_call>' }}",
    between="{{ '\\n' }}",
)
GLM = _formatted(
    "<tool_call>{{ name }}{%- for key, value in arguments | items %}"
    "{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}"
    "{{ '</arg_value>' }}{%- endfor %}{{ '\\n</tool_call>' }}",
    opens="<think>",
)
DEEPSEEK_V3 = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
{{- call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
DEEPSEEK_V31 = _formatted(
    "<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments if arguments is string else arguments | tojson }}"
    "<｜tool▁call▁end｜>",
    before="<｜tool▁calls▁begin｜>",
    after="<｜tool▁calls▁end｜>",
    opens="{{ '<think>' if thinking else '</think>' }}",
)
KIMI = _formatted(
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ arguments | tojson }}<|tool_call_end|>",
    before="<|tool_calls_section_begin|>",
    after="<|tool_calls_section_end|>",
)
PYTHONIC = _formatted(
    "{{ name }}({%- for key, value in arguments | items %}{{ key }}={{ value | tojson }}"
    "{%- if not loop.last %}, {% endif %}{%- endfor %})",
    before="[",
    between=", ",
    after="]",
)
# It asks for pythonic calls, and shows those before as JSON.
LLAMA4 = "Call functions as [func_name1(name=value), func_name2()].\n" + _formatted(
    '{"name": "{{ name }}", "parameters": {{ arguments | tojson }}}'
)
HARMONY = """\
{%- for message in messages %}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
UNKNOWN = _formatted('<call tool="{{ name }}">{{ arguments | tojson }}</call>')

BY_FORMAT = {
    "hermes": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "qwen3-coder": QWEN3_CODER,
    "glm": GLM,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V31,
    "kimi-k2": KIMI,
    "pythonic": PYTHONIC,
    "harmony": HARMONY,
}
"""Templates by the name of the format in which they write calls."""
