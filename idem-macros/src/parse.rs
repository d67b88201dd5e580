//! Tokens to parts: the attribute's arguments and the function's signature. Nothing here stops at the first mistake, and
//! the function's body stays raw tokens, so that errors in it are the compiler's own.

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::ext::IdentExt;
use syn::parse::{ParseStream, Parser};
use syn::{Attribute, Ident, LitInt, LitStr, Path, Signature, Token, Visibility};

use crate::diagnostics::{Diagnostics, did_you_mean, list};

/// The name of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Key,
    Consumer,
    Lease,
    MaxRun,
    Attempts,
    Backoff,
    Fingerprint,
    DomainUnique,
    OnConflict,
    Lock,
    Probe,
    Crate,
}

/// Every argument, as it is written, with an example for messages. The parser knows no others, and messages list these.
const ARGUMENTS: &[(Name, &str, &str)] = &[
    (Name::Key, "key", r#"key = "order_id""#),
    (Name::Consumer, "consumer", r#"consumer = "invoice""#),
    (Name::Lease, "lease", r#"lease = "30s""#),
    (Name::MaxRun, "max_run", r#"max_run = "5m""#),
    (Name::Attempts, "attempts", "attempts = 8"),
    (Name::Backoff, "backoff", r#"backoff = "250ms..1m""#),
    (Name::Fingerprint, "fingerprint", r#"fingerprint = ["amount", "currency"]"#),
    (Name::DomainUnique, "domain_unique", r#"domain_unique = "uq_invoices_order_id""#),
    (Name::OnConflict, "on_conflict", r#"on_conflict = "skip""#),
    (Name::Lock, "lock", r#"lock = "account_id""#),
    (Name::Probe, "probe", "probe = settled"),
    (Name::Crate, "crate", "crate = idem_core"),
];

impl Name {
    fn parse(written: &str) -> Option<Self> {
        ARGUMENTS.iter().find(|(_, name, _)| *name == written).map(|(name, ..)| *name)
    }

    /// As it is written.
    pub(crate) fn as_str(self) -> &'static str {
        self.row().1
    }

    /// The argument with a value.
    pub(crate) fn example(self) -> &'static str {
        self.row().2
    }

    fn row(self) -> &'static (Name, &'static str, &'static str) {
        ARGUMENTS.iter().find(|(name, ..)| *name == self).expect("idem-macros: an argument is not in its table")
    }
}

/// One argument as it was given.
#[derive(Debug)]
pub(crate) struct Argument {
    pub(crate) name: Name,
    pub(crate) name_span: Span,
    value: TokenStream,
}

/// The arguments as they were given: each at most once, its value not yet looked at.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    given: Vec<Argument>,
    /// Whether something was written that is no argument. Then nothing is called missing: it may be the one misspelled.
    pub(crate) any_unknown: bool,
}

impl Arguments {
    pub(crate) fn get(&self, name: Name) -> Option<&Argument> {
        self.given.iter().find(|argument| argument.name == name)
    }
}

/// Reads the attribute's arguments.
pub(crate) fn arguments(tokens: TokenStream, diagnostics: &mut Diagnostics) -> Arguments {
    let mut arguments = Arguments::default();
    for part in split_at_commas(tokens) {
        match argument.parse2(part) {
            Ok(Some(argument)) if arguments.get(argument.name).is_some() => {
                diagnostics.error(argument.name_span, format!("`{}` is given twice", argument.name.as_str()));
            }
            Ok(Some(argument)) => arguments.given.push(argument),
            Ok(None) => {}
            Err(error) => {
                arguments.any_unknown = true;
                diagnostics.parser(error);
            }
        }
    }
    arguments
}

/// The arguments' tokens, one stream for each, so that a mistake in one does not hide the next.
fn split_at_commas(tokens: TokenStream) -> Vec<TokenStream> {
    let mut parts = vec![TokenStream::new()];
    for token in tokens {
        match &token {
            TokenTree::Punct(punct) if punct.as_char() == ',' => parts.push(TokenStream::new()),
            _ => parts.last_mut().expect("idem-macros: there is always a last part").extend([token]),
        }
    }
    parts
}

/// One argument; nothing between two commas.
fn argument(input: ParseStream) -> syn::Result<Option<Argument>> {
    if input.is_empty() {
        return Ok(None);
    }
    if !input.peek(Ident::peek_any) {
        let unexpected: TokenStream = input.parse()?;
        let message = format!("expected an `#[idempotent]` argument such as `{}`", Name::Key.example());
        return Err(syn::Error::new_spanned(unexpected, message));
    }
    let written = input.call(Ident::parse_any)?;
    let name = Name::parse(&written.to_string()).ok_or_else(|| unknown_argument(&written))?;
    if input.peek(Token![=]) {
        input.parse::<Token![=]>()?;
        let value: TokenStream = input.parse()?;
        if !value.is_empty() {
            return Ok(Some(Argument { name, name_span: written.span(), value }));
        }
    }
    input.parse::<TokenStream>()?;
    Err(syn::Error::new(written.span(), format!("`{}` needs a value: write `{}`", name.as_str(), name.example())))
}

fn unknown_argument(written: &Ident) -> syn::Error {
    let allowed: Vec<&str> = ARGUMENTS.iter().map(|(_, name, _)| *name).collect();
    let suggestion = did_you_mean(&written.to_string(), &allowed);
    let message =
        format!("unknown `#[idempotent]` argument `{written}`{suggestion}; expected one of: {}", list(&allowed));
    syn::Error::new(written.span(), message)
}

/// A text of the attribute and the literal it stood in.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    pub(crate) text: String,
    pub(crate) span: Span,
}

impl From<LitStr> for Text {
    fn from(literal: LitStr) -> Self {
        Self { text: literal.value(), span: literal.span() }
    }
}

impl Argument {
    /// The value as one quoted text.
    pub(crate) fn text(&self, diagnostics: &mut Diagnostics) -> Option<Text> {
        self.value(diagnostics, |input| input.parse::<LitStr>().map(Text::from), "a text in quotes")
    }

    /// The value as one quoted text that is to be what `form` says.
    pub(crate) fn text_for(&self, form: &str, diagnostics: &mut Diagnostics) -> Option<Text> {
        self.value(diagnostics, |input| input.parse::<LitStr>().map(Text::from), &format!("{form}, in quotes"))
    }

    /// The value as one quoted text or a list of them.
    pub(crate) fn texts(&self, diagnostics: &mut Diagnostics) -> Vec<Text> {
        self.one_or_list(diagnostics, |input| input.parse::<LitStr>().map(Text::from))
    }

    /// The value as one source of text or a list of them. A field may stand without quotes.
    pub(crate) fn sources(&self, diagnostics: &mut Diagnostics) -> Vec<Text> {
        self.one_or_list(diagnostics, source)
    }

    /// The value as a whole number.
    pub(crate) fn whole_number(&self, diagnostics: &mut Diagnostics) -> Option<(u32, Span)> {
        let number = |input: ParseStream<'_>| {
            let literal: LitInt = input.parse()?;
            Ok((literal.base10_parse()?, literal.span()))
        };
        self.value(diagnostics, number, "a whole number")
    }

    /// The value as the path of a function, with or without quotes.
    pub(crate) fn function(&self, diagnostics: &mut Diagnostics) -> Option<Path> {
        let function = |input: ParseStream<'_>| {
            if input.peek(LitStr) {
                return input.parse::<LitStr>()?.parse_with(Path::parse_mod_style);
            }
            input.call(Path::parse_mod_style)
        };
        self.value(diagnostics, function, "the path of a function")
    }

    /// The value as a path.
    pub(crate) fn path(&self, diagnostics: &mut Diagnostics) -> Option<Path> {
        self.value(diagnostics, Path::parse_mod_style, "a path without quotes")
    }

    fn one_or_list(&self, diagnostics: &mut Diagnostics, one: fn(ParseStream) -> syn::Result<Text>) -> Vec<Text> {
        let one_or_list = |input: ParseStream<'_>| -> syn::Result<Vec<Text>> {
            if !input.peek(syn::token::Bracket) {
                return Ok(vec![one(input)?]);
            }
            let items;
            syn::bracketed!(items in input);
            Ok(items.parse_terminated(one, Token![,])?.into_iter().collect())
        };
        let texts = self.value(diagnostics, one_or_list, "a text in quotes or a list of them");
        if texts.as_ref().is_some_and(Vec::is_empty) {
            diagnostics.error_on(&self.value, format!("`{}` names nothing", self.name.as_str()));
        }
        texts.unwrap_or_default()
    }

    /// Parses all of the value, or says which form it must have.
    fn value<T>(
        &self,
        diagnostics: &mut Diagnostics,
        parser: impl FnOnce(ParseStream) -> syn::Result<T>,
        form: &str,
    ) -> Option<T> {
        let parsed = parser.parse2(self.value.clone());
        if parsed.is_err() {
            let (name, example) = (self.name.as_str(), self.name.example());
            diagnostics.error_on(&self.value, format!("`{name}` takes {form}: write `{example}`"));
        }
        parsed.ok()
    }
}

/// A quoted text, or fields without quotes: `order.id`.
fn source(input: ParseStream) -> syn::Result<Text> {
    if input.peek(LitStr) {
        return input.parse::<LitStr>().map(Text::from);
    }
    if input.peek(syn::LitBool) {
        return Err(input.error("a truth value is no field"));
    }
    let first = input.call(Ident::parse_any)?;
    let (mut text, span) = (first.to_string(), first.span());
    while input.peek(Token![.]) {
        input.parse::<Token![.]>()?;
        text = format!("{text}.{}", input.call(Ident::parse_any)?);
    }
    Ok(Text { text, span })
}

/// The function as it was written.
pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    /// The body with its braces, unparsed.
    pub(crate) body: TokenTree,
}

/// Reads the function that the attribute stands on.
pub(crate) fn function(item: TokenStream, diagnostics: &mut Diagnostics) -> Option<Function> {
    function_parts.parse2(item).map_err(|error| diagnostics.parser(error)).ok()
}

fn function_parts(input: ParseStream) -> syn::Result<Function> {
    let attrs = Attribute::parse_outer(input)?;
    let vis = input.parse()?;
    if !begins_function(input) {
        let item: TokenStream = input.parse()?;
        let first = item.into_iter().next().map(TokenTree::into_token_stream);
        return Err(syn::Error::new_spanned(first, "`#[idempotent]` goes on an `async fn`"));
    }
    let sig: Signature = input.parse()?;
    match input.parse()? {
        TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => {
            Ok(Function { attrs, vis, sig, body: body.into() })
        }
        _ => Err(syn::Error::new(sig.ident.span(), "an `#[idempotent]` handler must have a body")),
    }
}

/// Whether `fn` follows, after the words that may stand before it.
fn begins_function(input: ParseStream) -> bool {
    let ahead = input.fork();
    while let Ok(word) = ahead.call(Ident::parse_any) {
        match word.to_string().as_str() {
            "fn" => return true,
            "const" | "async" | "safe" | "unsafe" | "extern" | "default" => {}
            _ => return false,
        }
        // The text of `extern "C"`.
        let _: Option<LitStr> = ahead.parse().ok();
    }
    false
}
