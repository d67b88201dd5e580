//! `#[derive(Classify)]`: what it reads, what it checks, what it writes.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::meta::ParseNestedMeta;
use syn::spanned::Spanned;
use syn::{Attribute, Data, DeriveInput, Field, Fields, Ident, Member, Path, Token, Type, parse_quote};

use crate::diagnostics::{Diagnostics, did_you_mean, list};
use crate::paths::{DefaultCrate, alias, generated, import};

/// What a mark says.
#[derive(Clone, Copy)]
enum Mark {
    Transient,
    Terminal,
    /// What the single field says.
    Inner,
}

/// Every mark as it is written. The parser knows no others, and messages list these.
const MARKS: &[(&str, Mark)] = &[("transient", Mark::Transient), ("terminal", Mark::Terminal), ("inner", Mark::Inner)];

/// What counts where a mark could not be read: some mark was meant, so it is not also called missing.
const MISREAD: Mark = Mark::Transient;

/// How to mark something, for messages.
const HOW_TO_MARK: &str = "mark it with `#[classify(transient)]`, `#[classify(terminal)]` or `#[classify(inner)]`";

/// The type, checked.
struct Classified {
    input: DeriveInput,
    krate: Path,
    arms: Vec<Arm>,
}

/// One variant of an enum, or the whole of a struct.
struct Arm {
    /// `Self::Variant`, or `Self`.
    place: TokenStream,
    answer: Answer,
}

enum Answer {
    Transient,
    Terminal,
    Inner(Member, Box<Type>),
}

/// Reads, checks, expands. What is wrong counts as transient in the expansion, so that only the mistake itself is shown.
pub(crate) fn derive(default_crate: DefaultCrate, input: TokenStream) -> TokenStream {
    let mut diagnostics = Diagnostics::new();
    let classified = syn::parse2::<DeriveInput>(input)
        .map_err(|error| diagnostics.parser(error))
        .ok()
        .and_then(|input| check(input, default_crate, &mut diagnostics));
    let expanded = classified.as_ref().map(expand);
    let errors = diagnostics.finish();
    quote!(#expanded #errors)
}

fn check(input: DeriveInput, default_crate: DefaultCrate, diagnostics: &mut Diagnostics) -> Option<Classified> {
    let on_type = marks(&input.attrs, diagnostics);
    let krate = on_type.krate.unwrap_or_else(|| default_crate.path());
    let arms = match &input.data {
        Data::Enum(data) => {
            let arm = |variant: &syn::Variant| {
                let own = marks(&variant.attrs, diagnostics);
                if let Some(krate) = own.krate {
                    diagnostics.error_on(krate, "`crate = …` goes on the type");
                }
                let name = &variant.ident;
                let answer = answer(name, &variant.fields, own.mark.or(on_type.mark), diagnostics);
                Arm { place: quote!(Self::#name), answer }
            };
            data.variants.iter().map(arm).collect()
        }
        Data::Struct(data) => {
            let answer = answer(&input.ident, &data.fields, on_type.mark, diagnostics);
            vec![Arm { place: quote!(Self), answer }]
        }
        Data::Union(data) => {
            diagnostics.error_on(data.union_token, "`Classify` can be derived for enums and structs only");
            return None;
        }
    };
    Some(Classified { input, krate, arms })
}

/// What is written in the `#[classify(…)]` of one place.
#[derive(Default)]
struct Marks {
    mark: Option<(Mark, Span)>,
    krate: Option<Path>,
}

fn marks(attrs: &[Attribute], diagnostics: &mut Diagnostics) -> Marks {
    let mut marks = Marks::default();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("classify")) {
        let parsed = attr.parse_nested_meta(|meta| add_mark(&mut marks, &meta, diagnostics));
        if let Err(error) = parsed {
            diagnostics.parser(error);
            marks.mark = marks.mark.or(Some((MISREAD, attr.span())));
        }
    }
    marks
}

/// Adds one word of an attribute. Errors go to `diagnostics`, so that the next word is read nevertheless.
fn add_mark(marks: &mut Marks, meta: &ParseNestedMeta<'_>, diagnostics: &mut Diagnostics) -> syn::Result<()> {
    if meta.path.is_ident("crate") {
        marks.krate = Some(meta.value()?.call(Path::parse_mod_style)?);
        return Ok(());
    }
    let written = meta.path.to_token_stream().to_string();
    let span = meta.path.span();
    match MARKS.iter().find(|(name, _)| *name == written) {
        Some(_) if marks.mark.is_some() => {
            diagnostics.error(span, "only one of `transient`, `terminal`, `inner` can hold")
        }
        Some((_, mark)) => marks.mark = Some((*mark, span)),
        None => {
            let allowed: Vec<&str> = MARKS.iter().map(|(name, _)| *name).chain(["crate"]).collect();
            let suggestion = did_you_mean(&written, &allowed);
            let message =
                format!("unknown `#[classify]` argument `{written}`{suggestion}; expected one of: {}", list(&allowed));
            diagnostics.error(span, message);
            // A value after the word would stop the parser.
            if meta.input.peek(Token![=]) {
                meta.value()?.parse::<syn::Expr>()?;
            }
            marks.mark = marks.mark.or(Some((MISREAD, span)));
        }
    }
    Ok(())
}

fn answer(name: &Ident, fields: &Fields, mark: Option<(Mark, Span)>, diagnostics: &mut Diagnostics) -> Answer {
    for attr in fields.iter().flat_map(|field| &field.attrs).filter(|attr| attr.path().is_ident("classify")) {
        diagnostics.error_on(attr, format!("`#[classify]` goes on `{name}`, not on its field"));
    }
    match mark {
        Some((Mark::Transient, _)) => Answer::Transient,
        Some((Mark::Terminal, _)) => Answer::Terminal,
        Some((Mark::Inner, span)) => inner(name, fields, span, diagnostics),
        None => {
            let message = format!("`{name}` does not say whether trying again is of use: {HOW_TO_MARK}");
            diagnostics.error(name.span(), message);
            Answer::Transient
        }
    }
}

fn inner(name: &Ident, fields: &Fields, mark: Span, diagnostics: &mut Diagnostics) -> Answer {
    let mut all = fields.iter();
    match (all.next(), all.next()) {
        (Some(field), None) => Answer::Inner(member(field), Box::new(field.ty.clone())),
        _ => {
            let count = fields.len();
            diagnostics.error(mark, format!("`inner` asks the only field of `{name}`, which has {count} fields"));
            Answer::Transient
        }
    }
}

/// The name of an only field.
fn member(field: &Field) -> Member {
    field.ident.clone().map_or_else(|| Member::from(0), Member::Named)
}

fn expand(classified: &Classified) -> TokenStream {
    let Classified { input, krate, arms } = classified;
    let (idem, import, name) = (alias(), import(krate), &input.ident);
    let mut generics = input.generics.clone();
    bound_inner_types(&mut generics, arms);
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    let matched = if arms.is_empty() { quote!(*self) } else { quote!(self) };
    let arms = arms.iter().map(arm);
    quote! {
        const _: () = {
            #import
            #[automatically_derived]
            #[allow(deprecated, reason = "a deprecated variant is classified like any other")]
            impl #impl_generics #idem::Classify for #name #type_generics #where_clause {
                fn disposition(&self) -> #idem::Disposition {
                    match #matched { #(#arms,)* }
                }
            }
        };
    }
}

/// `E: Classify` for the field types that depend on a type parameter, as far as that can be told: for all of a generic type.
fn bound_inner_types(generics: &mut syn::Generics, arms: &[Arm]) {
    if generics.type_params().next().is_none() {
        return;
    }
    let idem = alias();
    let predicates = &mut generics.make_where_clause().predicates;
    for arm in arms {
        if let Answer::Inner(_, ty) = &arm.answer {
            predicates.push(parse_quote!(#ty: #idem::Classify));
        }
    }
}

fn arm(arm: &Arm) -> TokenStream {
    let (idem, place, inner) = (alias(), &arm.place, generated("inner"));
    match &arm.answer {
        Answer::Transient => quote!(#place { .. } => #idem::Disposition::Transient),
        Answer::Terminal => quote!(#place { .. } => #idem::Disposition::Terminal),
        Answer::Inner(member, ty) => {
            quote!(#place { #member: #inner } => <#ty as #idem::Classify>::disposition(#inner))
        }
    }
}
