"""Templates by name, written by us from the published formats.

chatml: OpenAI's Chat Markup Language, `openai-python/chatml.md`; as Qwen writes it.
llama3: "Llama 3 model card and prompt formats", section Llama 3 Instruct (Meta, 2024).

Both say with `{% generation %}` what the model writes: an answer and the token that ends it.
"""

from __future__ import annotations

CHATML = """\
{%- if tools %}{{ raise_exception("the template chatml has no place for tools") }}{% endif -%}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content + "<|im_end|>" }}{% endgeneration %}
    {%- else %}
        {{- message.content + "<|im_end|>" }}
    {%- endif %}
    {{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""

LLAMA3 = """\
{%- if tools %}{{ raise_exception("the template llama3 has no place for tools") }}{% endif -%}
{{- bos_token if bos_token else "<|begin_of_text|>" }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content | trim }}{{ "<|eot_id|>" }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}{{ "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}
