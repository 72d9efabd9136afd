"""BibTeX of the papers of methods, for model cards."""


def _entry(key: str, title: str, year: int, *, authors: str = "", eprint: str = "", url: str = "") -> str:
    fields = {"title": f"{{{title}}}", "author": authors, "year": str(year)}
    if eprint:
        fields |= {"eprint": eprint, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{eprint}"}
    else:
        fields["url"] = url
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
    return f"@misc{{{key},\n" + ",\n".join(lines) + "\n}"


PI = _entry(
    "chen2023extending",
    "Extending Context Window of Large Language Models via Positional Interpolation",
    2023,
    authors="Chen, Shouyuan and Wong, Sherman and Chen, Liangjian and Tian, Yuandong",
    eprint="2306.15595",
)
YARN = _entry(
    "peng2023yarn",
    "YaRN: Efficient Context Window Extension of Large Language Models",
    2023,
    authors="Peng, Bowen and Quesnelle, Jeffrey and Fan, Honglu and Shippole, Enrico",
    eprint="2309.00071",
)
NTK_AWARE = _entry(
    "bloc97ntk",
    "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+) context size without any fine-tuning and minimal "
    "perplexity degradation",
    2023,
    authors="{bloc97}",
    url="https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5/ntkaware_scaled_rope_allows_llama_models_to_have/",
)
ABF = _entry(
    "xiong2023effective",
    "Effective Long-Context Scaling of Foundation Models",
    2023,
    authors="Xiong, Wenhan and Liu, Jingyu and Molybog, Igor and Zhang, Hejia and others",
    eprint="2309.16039",
)
LONGROPE = _entry(
    "ding2024longrope",
    "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
    2024,
    authors="Ding, Yiran and Zhang, Li Lyna and Zhang, Chengruidong and Xu, Yuanyuan and Shang, Ning and Xu, Jiahang "
    "and Yang, Fan and Yang, Mao",
    eprint="2402.13753",
)
LLAMA3 = _entry(
    "grattafiori2024llama3",
    "The Llama 3 Herd of Models",
    2024,
    authors="Grattafiori, Aaron and others",
    eprint="2407.21783",
)
DROPE = _entry(
    "gelberg2025drope",
    "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings",
    2025,
    authors="Gelberg, Yoav and Eguchi, Koshi and Akiba, Takuya and Cetin, Edoardo",
    eprint="2512.12167",
)
COPE = _entry(
    "li2026cope",
    "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs",
    2026,
    authors="Li, Haoran and Ren, Sucheng and Yuille, Alan and Wang, Feng",
    eprint="2602.05258",
)
RPSD = _entry(
    "li2026shuffle",
    "Shuffle the Context: RoPE-Perturbed Self-Distillation for Long-Context Adaptation",
    2026,
    authors="Li, Zichong and Liang, Chen and Ren, Liliang and Zhao, Tuo and Shen, Yelong and Chen, Weizhu",
    eprint="2604.14339",
)
LINEAR_ARD = _entry(
    "yang2026linearard",
    "LinearARD: Linear-Memory Attention Distillation for RoPE Restoration",
    2026,
    authors="Yang, Ning and Zhong, Hengyu and Wang, Wentao and Tian, Baoliang and Zhang, Haijun and Wang, Jun",
    eprint="2604.00004",
)
# the pages that name the authors of these two give no order, or none of them
POSAUG = _entry(
    "posaug2026",
    "Position Augmentation: Reducing RoPE Extrapolation Cliffs via Random Position Scaling During Training",
    2026,
    url="https://openreview.net/forum?id=hKvffID66N",
)
ENDPROMPT = _entry(
    "endprompt2026",
    "EndPrompt: Efficient Long-Context Extension via Terminal Anchoring",
    2026,
    eprint="2605.14589",
)
POSE = _entry(
    "zhu2023pose",
    "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training",
    2023,
    authors="Zhu, Dawei and Yang, Nan and Wang, Liang and Song, Yifan and Wu, Wenhao and Wei, Furu and Li, Sujian",
    eprint="2309.10400",
)
LONGRECIPE = _entry(
    "hu2024longrecipe",
    "LongRecipe: Recipe for Efficient Long Context Generalization in Large Language Models",
    2024,
    authors="Hu, Zhiyuan and Liu, Yuliang and Zhao, Jinman and Wang, Suyuchen and Wang, Yan and Shen, Wei and Gu, Qing "
    "and Luu, Anh Tuan and Ng, See-Kiong and Jiang, Zhiwei and Hooi, Bryan",
    eprint="2409.00509",
)
CREAM = _entry(
    "wu2024cream",
    "An Efficient Recipe for Long Context Extension via Middle-Focused Positional Encoding",
    2024,
    authors="Wu, Tong and Zhao, Yanpeng and Zheng, Zilong",
    eprint="2406.07138",
)
LONGRED = _entry(
    "dong2025longred",
    "LongReD: Mitigating Short-Text Degradation of Long-Context Large Language Models via Restoration Distillation",
    2025,
    authors="Dong, Zican and Li, Junyi and Jiang, Jinhao and Xu, Mingyu and Zhao, Wayne Xin and Wang, Bingning and "
    "Chen, Weipeng",
    eprint="2502.07365",
)
RANDOMIZED_POSITIONS = _entry(
    "ruoss2023randomized",
    "Randomized Positional Encodings Boost Length Generalization of Transformers",
    2023,
    authors="Ruoss, Anian and Del{\\'e}tang, Gr{\\'e}goire and Genewein, Tim and Grau-Moya, Jordi and "
    "Csord{\\'a}s, R{\\'o}bert and Bennani, Mehdi and Legg, Shane and Veness, Joel",
    eprint="2305.16843",
)
RANDOM_FLOATS = _entry(
    "shimizu2026random",
    "Position Encoding with Random Float Sampling Enhances Length Generalization of Transformers",
    2026,
    authors="Shimizu, Atsushi and Taniguchi, Shohei and Matsuo, Yutaka",
    eprint="2602.14050",
)
LONGCE = _entry(
    "fang2024longce",
    "What is Wrong with Perplexity for Long-context Language Modeling?",
    2024,
    authors="Fang, Lizhe and Wang, Yifei and Liu, Zhaoyang and Zhang, Chenheng and Jegelka, Stefanie and Gao, Jinyang "
    "and Ding, Bolin and Wang, Yisen",
    eprint="2410.23771",
)
LONGLORA = _entry(
    "chen2023longlora",
    "LongLoRA: Efficient Fine-tuning of Long-Context Large Language Models",
    2023,
    authors="Chen, Yukang and Qian, Shengju and Tang, Haotian and Lai, Xin and Liu, Zhijian and Han, Song and Jia, "
    "Jiaya",
    eprint="2309.12307",
)
TRL = """@software{vonwerra2020trl,
  title = {{TRL: Transformers Reinforcement Learning}},
  author = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
    Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallou{\\'e}dec, Quentin},
  url = {https://github.com/huggingface/trl},
  year = {2020}
}"""
